// The work of kernels on a GPU. All of it is enqueued on TensorFlow's stream.
#ifndef WRAPOPT_CC_KERNELS_GPU_H_
#define WRAPOPT_CC_KERNELS_GPU_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "cc/gpu/launcher.h"
#include "cc/kernels/elementwise_cpu.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace wrapopt {

// Whether the kernel runs on a GPU.
bool IsOnGpu(tensorflow::OpKernelContext* ctx);

// `to` has the dtype and shape of `from`.
absl::Status CopyOnGpu(tensorflow::OpKernelContext* ctx,
                       const tensorflow::Tensor& from, tensorflow::Tensor* to);

absl::Status ZeroOnGpu(tensorflow::OpKernelContext* ctx,
                       tensorflow::Tensor* tensor);

// Which rows of tables the variables of a pass are, if its averages may lag
// behind and catch up first. Of each variable:
struct LazyRows {
  // How many elements its rows have, 0 where it is one row; see gpu::Update.
  std::vector<uint64_t> row_elements;
  // Of each average: the log decays from its first row on; then of each: those of
  // all steps.
  std::vector<const double*> log_decays;
  bool is_step = true;  // Whether they do anything but catch up.
};

absl::Status RunPassOnGpu(tensorflow::OpKernelContext* ctx, const Pass& pass,
                          const LazyRows* lazy = nullptr);

absl::Status MarkRowsOnGpu(tensorflow::OpKernelContext* ctx,
                           const gpu::RowMarks& marks);

absl::Status SumRowsOnGpu(tensorflow::OpKernelContext* ctx,
                          const gpu::RowSum& sum);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_GPU_H_
