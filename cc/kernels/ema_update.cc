#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/engine/elementwise.h"
#include "cc/engine/isa.h"
#include "cc/kernels/averages.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/parallel.h"
#include "cc/kernels/registration.h"
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
  explicit EmaUpdateOp(OpKernelConstruction* ctx, bool is_packed = false)
      : OpKernel(ctx), is_packed_(is_packed) {
    Isa isa;
    OP_REQUIRES_OK(ctx, FindIsa(&isa));
    OP_REQUIRES_OK(ctx, averages_.Init(ctx, isa));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<double> rates;
    OP_REQUIRES_OK(ctx, averages_.ReadDecays(ctx, &rates));
    Variables variables(ctx, &lookup_cache_, is_packed_);
    const int n = averages_.values();
    int shadows, values;
    OP_REQUIRES_OK(ctx,
                   variables.Find("shadows", n * averages_.per_value(),
                                  Variables::Access::kWrite, &shadows));
    OP_REQUIRES_OK(ctx, variables.Find("values", n, Variables::Access::kRead,
                                       &values));
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
  const bool is_packed_;
  Variables::LookupCache lookup_cache_;
  Averages averages_;
};

class PackedEmaUpdateOp : public EmaUpdateOp {
 public:
  explicit PackedEmaUpdateOp(OpKernelConstruction* ctx)
      : EmaUpdateOp(ctx, /*is_packed=*/true) {}
};

const bool ema_update_registered =
    RegisterKernel<EmaUpdateOp>("Wrapopt>EmaUpdate",
                                {"shadows", "values", "decays"}) &&
    RegisterKernel<EmaUpdateOp>("Wrapopt>EmaUpdateRef", {"decays"}) &&
    RegisterKernel<PackedEmaUpdateOp>("Wrapopt>EmaUpdateBundle",
                                      {"handles", "decays"});

}  // namespace
}  // namespace wrapopt
