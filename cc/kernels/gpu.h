// The work of kernels on a GPU. All of it is enqueued on TensorFlow's stream.
#ifndef WRAPOPT_CC_KERNELS_GPU_H_
#define WRAPOPT_CC_KERNELS_GPU_H_

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

absl::Status RunPassOnGpu(tensorflow::OpKernelContext* ctx, const Pass& pass);

absl::Status SumRowsOnGpu(tensorflow::OpKernelContext* ctx,
                          const gpu::RowSum& sum);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_GPU_H_
