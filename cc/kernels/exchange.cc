#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/kernels/variables.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

// Serves resource and ref variables: `Variables` knows the difference.
class ExchangeOp : public OpKernel {
 public:
  explicit ExchangeOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    Variables variables(ctx, &memory_);
    int a, b;
    OP_REQUIRES_OK(ctx, variables.Find("a", Variables::Access::kWrite, &a));
    OP_REQUIRES_OK(ctx, variables.Find("b", Variables::Access::kWrite, &b));
    OP_REQUIRES_OK(ctx, variables.Lock());
    const int n = b - a;
    for (int i = 0; i < n; ++i) {
      const tensorflow::DataType got = variables.tensor(b + i)->dtype();
      const tensorflow::DataType expected = variables.tensor(a + i)->dtype();
      OP_REQUIRES(
          ctx, got == expected,
          absl::InvalidArgumentError(absl::StrCat(
              variables.Describe(b + i), " must be of dtype ",
              tensorflow::DataTypeString(expected), " (the dtype of ",
              variables.Describe(a + i), "), got ",
              tensorflow::DataTypeString(got),
              ": buffers are exchanged, not converted")));
      OP_REQUIRES(
          ctx, tensorflow::DataTypeCanUseMemcpy(expected),
          absl::InvalidArgumentError(absl::StrCat(
              variables.Describe(a + i), " must be of a numeric dtype, got ",
              tensorflow::DataTypeString(expected))));
      OP_REQUIRES_OK(ctx, variables.CheckSameShape(b + i, a + i));
    }
    for (int i = 0; i < n; ++i) {
      OP_REQUIRES_OK(ctx, variables.PrepareToSwap(a + i, b + i));
    }
    for (int i = 0; i < n; ++i) variables.Swap(a + i, b + i);
  }

 private:
  Variables::Memory memory_;
};

REGISTER_KERNEL_BUILDER(
    Name("Wrapopt>Exchange").Device(tensorflow::DEVICE_CPU), ExchangeOp);
REGISTER_KERNEL_BUILDER(
    Name("Wrapopt>ExchangeRef").Device(tensorflow::DEVICE_CPU), ExchangeOp);
REGISTER_KERNEL_BUILDER(Name("Wrapopt>Exchange")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("a")
                            .HostMemory("b"),
                        ExchangeOp);
REGISTER_KERNEL_BUILDER(
    Name("Wrapopt>ExchangeRef").Device(tensorflow::DEVICE_GPU), ExchangeOp);

}  // namespace
}  // namespace wrapopt
