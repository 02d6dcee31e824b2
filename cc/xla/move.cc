// Wrapopt>CheckInitialized. Wrapopt>Move has no kernel for XLA: averages take
// the place of their variables outside of compiled functions.
#include "cc/xla/registration.h"
#include "cc/xla/variables.h"
#include "tensorflow/compiler/tf2xla/xla_op_kernel.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::XlaOpKernel;
using tensorflow::XlaOpKernelContext;
using Access = XlaVariables::Access;

class CheckInitializedXlaOp : public XlaOpKernel {
 public:
  explicit CheckInitializedXlaOp(OpKernelConstruction* ctx)
      : XlaOpKernel(ctx) {}

  void Compile(XlaOpKernelContext* ctx) override {
    XlaVariables variables(ctx);
    int first;
    OP_REQUIRES_OK(ctx, variables.Find("variables", Access::kRead, &first));
  }
};

const bool check_initialized_registered =
    RegisterXlaKernel<CheckInitializedXlaOp>("Wrapopt>CheckInitialized");

}  // namespace
}  // namespace wrapopt
