#include <vector>

#include "cc/xla/averages.h"
#include "cc/xla/custom_call.h"
#include "cc/xla/ffi_handlers.h"
#include "cc/xla/registration.h"
#include "cc/xla/variables.h"
#include "tensorflow/compiler/tf2xla/xla_op_kernel.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "xla/hlo/builder/xla_builder.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::XlaOpKernel;
using tensorflow::XlaOpKernelContext;
using xla::XlaOp;

class EmaUpdateXlaOp : public XlaOpKernel {
 public:
  explicit EmaUpdateXlaOp(OpKernelConstruction* ctx) : XlaOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, averages_.Init(ctx));
  }

  void Compile(XlaOpKernelContext* ctx) override {
    std::vector<XlaOp> rates;
    OP_REQUIRES_OK(ctx, averages_.ReadDecays(ctx, &rates));
    XlaVariables variables(ctx);
    const int shadows = 0, values = averages_.count();
    OP_REQUIRES_OK(ctx, variables.Find(averages_.Lists()));
    OP_REQUIRES_OK(ctx, averages_.Check(variables, shadows, values));

    bool calls;
    OP_REQUIRES_OK(ctx, CallsKernels(ctx, &calls));
    if (calls) {
      KernelCall call(&variables);
      call.Read(ctx->Input("decays"));
      call.Write(shadows, values - shadows);
      for (int i = 0; i < averages_.values(); ++i) {
        call.Read(variables.value(values + i));
      }
      OP_REQUIRES_OK(ctx, call.Emit(ctx->builder(), kEmaUpdateCall));
      return;
    }
    for (int k = 0; k < averages_.per_value(); ++k) {
      for (int i = 0; i < averages_.values(); ++i) {
        const int shadow = shadows + k * averages_.values() + i;
        OP_REQUIRES_OK(ctx, variables.Assign(
                                shadow, averages_.Updated(
                                            variables.value(shadow),
                                            variables.value(values + i),
                                            rates[k])));
      }
    }
  }

 private:
  XlaAverages averages_;
};

const bool ema_update_registered =
    RegisterXlaKernel<EmaUpdateXlaOp>("Wrapopt>EmaUpdate");

}  // namespace
}  // namespace wrapopt
