// Wrapopt>Bundle: packs the handles of variables into one tensor, a handle
// pack.
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/kernels/registration.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::ResourceHandle;
using tensorflow::Tensor;

class HandlePackOp : public OpKernel {
 public:
  explicit HandlePackOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    Tensor* handles;
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(0, {ctx->num_inputs()}, &handles));
    auto to = handles->vec<ResourceHandle>();
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      const Tensor& variable = ctx->input(i);
      OP_REQUIRES(ctx, variable.NumElements() == 1,
                  absl::InvalidArgumentError(absl::StrCat(
                      "variables[", i, "] must be one resource handle, got a ",
                      "tensor of shape ", variable.shape().DebugString())));
      to(i) = variable.flat<ResourceHandle>()(0);
    }
  }
};

const bool handle_pack_registered =
    RegisterKernel<HandlePackOp>("Wrapopt>Bundle", {"variables", "handles"});

}  // namespace
}  // namespace wrapopt
