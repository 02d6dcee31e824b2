// The work of kernels on a GPU. All of it is enqueued on TensorFlow's stream.
#ifndef WRAPOPT_CC_KERNELS_GPU_H_
#define WRAPOPT_CC_KERNELS_GPU_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "cc/engine/elementwise.h"
#include "cc/gpu/launcher.h"
#include "cc/rules/rules.h"
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

// The rows that are the variables of a pass, if averages lag behind and must
// catch up first.
struct LazyRows {
  // For each variable: the elements of a row, or 0 if the variable is one row.
  // See gpu::Update.
  std::vector<uint64_t> row_elements;
  // For each variable: for each average, the address of the log decay of the
  // variable's first row; then for each average, that of all_steps.
  std::vector<const double*> log_decays;
  bool is_step = true;  // False if the averages only catch up.
};

absl::Status RunPassOnGpu(tensorflow::OpKernelContext* ctx, const Pass& pass,
                          const LazyRows* lazy = nullptr);

absl::Status MarkRowsOnGpu(tensorflow::OpKernelContext* ctx,
                           const gpu::RowMarks& marks);

absl::Status SumRowsOnGpu(tensorflow::OpKernelContext* ctx,
                          const gpu::RowSum& sum);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_GPU_H_
