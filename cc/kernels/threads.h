// Runs a kernel's work on TensorFlow's intra-op thread pool or a GPU's stream.
#ifndef WRAPOPT_CC_KERNELS_THREADS_H_
#define WRAPOPT_CC_KERNELS_THREADS_H_

#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "cc/engine/elementwise.h"
#include "cc/engine/threads.h"
#include "cc/kernels/gpu.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/threadpool.h"

namespace wrapopt {

class IntraOpThreads final : public Threads {
 public:
  explicit IntraOpThreads(tensorflow::OpKernelContext* ctx)
      : pool_(*ctx->device()->tensorflow_cpu_worker_threads()->workers) {}

  int64_t count() const override { return pool_.NumThreads(); }
  void Schedule(std::function<void()> task) const override {
    pool_.Schedule(std::move(task));
  }

 private:
  tensorflow::thread::ThreadPool& pool_;
};

template <class Work>
void RunParallel(tensorflow::OpKernelContext* ctx, int64_t units,
                 int64_t cycles_per_unit, const Work& work) {
  RunParallel(IntraOpThreads(ctx), units, cycles_per_unit, work);
}

inline absl::Status RunPass(tensorflow::OpKernelContext* ctx,
                            const Pass& pass) {
  if (IsOnGpu(ctx)) return RunPassOnGpu(ctx, pass);
  RunPass(IntraOpThreads(ctx), pass);
  return absl::OkStatus();
}

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_THREADS_H_
