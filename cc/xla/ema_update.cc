#include <vector>

#include "cc/xla/averages.h"
#include "cc/xla/custom_call.h"
#include "cc/xla/ffi_handlers.h"
#include "cc/xla/registration.h"
#include "cc/xla/variables.h"
#include "tensorflow/compiler/tf2xla/xla_op_kernel.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "xla/hlo/builder/lib/constants.h"
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

    Calls calls;
    OP_REQUIRES_OK(ctx, CallsKernels(ctx, &calls));
    if (calls == Calls::kCpu) {
      KernelCall call(&variables);
      call.Read(ctx->Input("decays"));
      call.Write(shadows, values - shadows);
      for (int i = 0; i < averages_.values(); ++i) {
        call.Read(variables.value(values + i));
      }
      OP_REQUIRES_OK(ctx, call.Emit(ctx->builder(), kEmaUpdateCall));
      return;
    }
    std::vector<int> called;
    for (int i = 0; i < averages_.values(); ++i) {
      if (calls == Calls::kGpu && variables.shape(values + i).num_elements() <=
                                      kMostElementsOfGpuCall) {
        called.push_back(i);
        continue;
      }
      for (int k = 0; k < averages_.per_value(); ++k) {
        const int shadow = shadows + k * averages_.values() + i;
        OP_REQUIRES_OK(ctx, variables.Assign(
                                shadow, averages_.Updated(
                                            variables.value(shadow),
                                            variables.value(values + i),
                                            rates[k])));
      }
    }
    if (called.empty()) return;
    KernelCall call(&variables);
    call.Read(xla::ConstantR0<bool>(ctx->builder(), true));
    call.Read(GpuNumbers(xla::ConstantR1<double>(ctx->builder(), {1}),
                         ctx->Input("decays")));
    for (int k = 0; k < averages_.per_value(); ++k) {
      for (const int i : called) {
        call.Write(shadows + k * averages_.values() + i, 1);
      }
    }
    for (const int i : called) call.Read(variables.value(values + i));
    OP_REQUIRES_OK(ctx, call.Emit(ctx->builder(), kGpuUpdateCall,
                                  "{rule = \"\"}"));
  }

 private:
  XlaAverages averages_;
};

const bool ema_update_registered =
    RegisterXlaKernel<EmaUpdateXlaOp>("Wrapopt>EmaUpdate");

}  // namespace
}  // namespace wrapopt
