#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/kernels/averages.h"
#include "cc/kernels/elementwise_cpu.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/isa.h"
#include "cc/kernels/parallel.h"
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
  explicit EmaUpdateOp(OpKernelConstruction* ctx, bool bundled = false)
      : OpKernel(ctx), bundled_(bundled) {
    Isa isa;
    OP_REQUIRES_OK(ctx, FindIsa(&isa));
    OP_REQUIRES_OK(ctx, averages_.Init(ctx, isa));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<double> rates;
    OP_REQUIRES_OK(ctx, averages_.ReadDecays(ctx, &rates));
    Variables variables(ctx, &lookup_cache_);
    int shadows, values;
    OP_REQUIRES_OK(ctx, Find("shadows", Variables::Access::kWrite,
                             averages_.values() * averages_.per_value(),
                             &variables, &shadows));
    OP_REQUIRES_OK(ctx, Find("values", Variables::Access::kRead,
                             averages_.values(), &variables, &values));
    OP_REQUIRES_OK(ctx, variables.Lock());
    OP_REQUIRES_OK(ctx, averages_.Check(variables, shadows, values));
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite());

    Pass pass;
    averages_.AddStages(rates, SizeOf(NumberOf(averages_.value_dtype())),
                        &pass);
    std::vector<void*> operands;
    for (int i = 0; i < averages_.values(); ++i) {
      operands.clear();
      averages_.AddOperands(&variables, shadows, values, i, &operands);
      pass.AddVariable(variables.size(values + i), operands);
    }
    OP_REQUIRES_OK(ctx, RunPass(ctx, pass));
  }

 private:
  // Finds the `count` variables of a list.
  absl::Status Find(const char* list, Variables::Access access, int count,
                    Variables* variables, int* first) const {
    return bundled_ ? variables->FindInBundle(list, count, access, first)
                    : variables->Find(list, access, first);
  }

  const bool bundled_;
  Variables::LookupCache lookup_cache_;
  Averages averages_;
};

class EmaUpdateBundleOp : public EmaUpdateOp {
 public:
  explicit EmaUpdateBundleOp(OpKernelConstruction* ctx)
      : EmaUpdateOp(ctx, /*bundled=*/true) {}
};

REGISTER_KERNEL_BUILDER(
    Name("Wrapopt>EmaUpdate").Device(tensorflow::DEVICE_CPU), EmaUpdateOp);
REGISTER_KERNEL_BUILDER(
    Name("Wrapopt>EmaUpdateRef").Device(tensorflow::DEVICE_CPU), EmaUpdateOp);
REGISTER_KERNEL_BUILDER(Name("Wrapopt>EmaUpdate")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("shadows")
                            .HostMemory("values")
                            .HostMemory("decays"),
                        EmaUpdateOp);
REGISTER_KERNEL_BUILDER(Name("Wrapopt>EmaUpdateRef")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("decays"),
                        EmaUpdateOp);
REGISTER_KERNEL_BUILDER(
    Name("Wrapopt>EmaUpdateBundle").Device(tensorflow::DEVICE_CPU),
    EmaUpdateBundleOp);
REGISTER_KERNEL_BUILDER(Name("Wrapopt>EmaUpdateBundle")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("handles")
                            .HostMemory("decays"),
                        EmaUpdateBundleOp);

}  // namespace
}  // namespace wrapopt
