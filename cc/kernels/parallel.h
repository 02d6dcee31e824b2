// Runs a pass: on TensorFlow's intra-op thread pool, or on the stream of a GPU.
#ifndef WRAPOPT_CC_KERNELS_PARALLEL_H_
#define WRAPOPT_CC_KERNELS_PARALLEL_H_

#include <algorithm>
#include <atomic>

#include "absl/status/status.h"
#include "cc/kernels/elementwise_cpu.h"
#include "cc/kernels/gpu.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/threadpool.h"

namespace wrapopt {

// Runs `work` on ranges that together are [0, units). A small total runs on
// this thread.
template <class Work>
void RunParallel(tensorflow::OpKernelContext* ctx, int64_t units,
                 int64_t cycles_per_unit, const Work& work) {
  // What a thread costs to wake, and what a range should take: so short that
  // no thread has much left to do when the others are done.
  constexpr int64_t kCyclesToShare = 200000;
  constexpr int64_t kCyclesPerRange = 200000;
  cycles_per_unit = std::max<int64_t>(1, cycles_per_unit);
  if (units == 0) return;
  if (units * cycles_per_unit < kCyclesToShare) return work(0, units);
  auto& pool = *ctx->device()->tensorflow_cpu_worker_threads()->workers;
  const int64_t range = std::max<int64_t>(1, kCyclesPerRange / cycles_per_unit);
  const int64_t threads =
      std::min<int64_t>(pool.NumThreads(), (units + range - 1) / range);
  // This thread and the pool's each take the next range: those that begin late,
  // because the pool is busy or slow to wake, find less left to do.
  std::atomic<int64_t> next{0};
  pool.ParallelFor(
      threads, tsl::thread::ThreadPool::SchedulingParams::Fixed(1),
      [&](int64_t, int64_t) {
        for (;;) {
          const int64_t begin = next.fetch_add(range);
          if (begin >= units) return;
          work(begin, std::min(begin + range, units));
        }
      });
}

inline absl::Status RunPass(tensorflow::OpKernelContext* ctx,
                            const Pass& pass) {
  if (IsOnGpu(ctx)) return RunPassOnGpu(ctx, pass);
  // What one core moves in a cycle when another is busy too.
  constexpr double kBytesPerCycle = 8;
  RunParallel(ctx, pass.blocks(),
              pass.blocks() == 0
                  ? 0
                  : static_cast<int64_t>(pass.bytes() / pass.blocks() /
                                         kBytesPerCycle),
              [&pass](int64_t begin, int64_t end) { pass.Run(begin, end); });
  return absl::OkStatus();
}

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_PARALLEL_H_
