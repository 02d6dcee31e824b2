#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/engine/elementwise.h"
#include "cc/engine/isa.h"
#include "cc/kernels/averages.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/registration.h"
#include "cc/kernels/threads.h"
#include "cc/kernels/variables.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

// For resource and ref variables: `Variables` handles the difference.
class EmaUpdateOp : public OpKernel {
 public:
  explicit EmaUpdateOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    Isa isa;
    OP_REQUIRES_OK(ctx, FindIsa(&isa));
    OP_REQUIRES_OK(ctx, averages_.Init(ctx, isa));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<double> rates;
    OP_REQUIRES_OK(ctx, averages_.ReadDecays(ctx, &rates));
    Variables variables(ctx, &lookup_cache_);
    const int n = averages_.values();
    const int shadows = 0, values = averages_.count();
    OP_REQUIRES_OK(ctx, variables.Find(averages_.Lists(),
                                       Variables::Access::kWrite));
    OP_REQUIRES_OK(ctx, variables.Lock());
    OP_REQUIRES_OK(ctx, averages_.Check(variables, shadows, values));
    averages_.LeaveIdle(rates, shadows, &variables);
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite());

    Pass pass;
    averages_.AddStages(rates, SizeOf(NumberOf(averages_.value_dtype())),
                        &pass);
    std::vector<void*> operands;
    for (int i = 0; i < n; ++i) {
      operands.clear();
      averages_.AddOperands(&variables, shadows, values, i, &operands);
      pass.AddVariable(variables.size(values + i), operands);
    }
    OP_REQUIRES_OK(ctx, RunPass(ctx, pass));
  }

 private:
  Variables::LookupCache lookup_cache_;
  Averages averages_;
};

const bool ema_update_registered =
    RegisterKernel<EmaUpdateOp>("Wrapopt>EmaUpdate",
                                {"variables", "decays"}) &&
    RegisterKernel<EmaUpdateOp>("Wrapopt>EmaUpdateRef", {"decays"});

}  // namespace
}  // namespace wrapopt
