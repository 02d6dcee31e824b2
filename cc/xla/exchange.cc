#include "cc/ops/exchange.h"

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

class ExchangeXlaOp : public XlaOpKernel {
 public:
  explicit ExchangeXlaOp(OpKernelConstruction* ctx) : XlaOpKernel(ctx) {}

  void Compile(XlaOpKernelContext* ctx) override {
    XlaVariables variables(ctx);
    int a, b;
    OP_REQUIRES_OK(ctx, variables.Find("a", Access::kWrite, &a));
    OP_REQUIRES_OK(ctx, variables.Find("b", Access::kWrite, &b));
    const int n = b - a;
    for (int i = 0; i < n; ++i) {
      OP_REQUIRES_OK(ctx, CheckExchange(variables, a + i, b + i));
    }
    for (int i = 0; i < n; ++i) {
      OP_REQUIRES_OK(ctx,
                     variables.Assign(a + i, variables.value(b + i)));
      OP_REQUIRES_OK(ctx,
                     variables.Assign(b + i, variables.value(a + i)));
    }
  }
};

const bool exchange_registered =
    RegisterXlaKernel<ExchangeXlaOp>("Wrapopt>Exchange");

}  // namespace
}  // namespace wrapopt
