// Runs a pass on TensorFlow's intra-op thread pool.
#ifndef WRAPOPT_CC_KERNELS_PARALLEL_H_
#define WRAPOPT_CC_KERNELS_PARALLEL_H_

#include <algorithm>

#include "cc/kernels/elementwise_cpu.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/threadpool.h"

namespace wrapopt {

// Below some 2 MB of traffic the cost model keeps the pass on this thread.
inline void RunPass(tensorflow::OpKernelContext* ctx, const Pass& pass) {
  const int64_t blocks = pass.blocks();
  if (blocks == 0) return;
  // What one core moves in a cycle when another is busy too.
  constexpr double kBytesPerCycle = 8;
  const int64_t cycles_per_block = std::max<int64_t>(
      1, static_cast<int64_t>(pass.bytes() / blocks / kBytesPerCycle));
  ctx->device()->tensorflow_cpu_worker_threads()->workers->ParallelFor(
      blocks,
      tsl::thread::ThreadPool::SchedulingParams::Adaptive(cycles_per_block),
      [&pass](int64_t begin, int64_t end) { pass.Run(begin, end); });
}

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_PARALLEL_H_
