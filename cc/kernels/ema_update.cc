#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/kernels/elementwise_cpu.h"
#include "cc/kernels/isa.h"
#include "cc/kernels/number.h"
#include "cc/kernels/parallel.h"
#include "cc/kernels/variables.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

Number NumberOf(tensorflow::DataType dtype) {
  switch (dtype) {
    case tensorflow::DT_HALF:
      return Number::kHalf;
    case tensorflow::DT_BFLOAT16:
      return Number::kBfloat16;
    case tensorflow::DT_DOUBLE:
      return Number::kDouble;
    default:
      return Number::kFloat;
  }
}

// rate[k] = 1 - decay[k], in double: 1 - 0.9999 in float is off by 1.7e-5.
absl::Status RatesFromDecays(const Tensor& decays, int64_t averages,
                             std::vector<double>* rates) {
  if (decays.dims() != 1 || decays.NumElements() != averages) {
    return absl::InvalidArgumentError(
        absl::StrCat("decays misshapen: got ", decays.shape().DebugString(),
                     " but expected [", averages,
                     "] (one decay for each shadow of a value)"));
  }
  for (int64_t k = 0; k < averages; ++k) {
    const double decay = decays.vec<double>()(k);
    if (!(decay >= 0 && decay <= 1)) {
      return absl::InvalidArgumentError(
          absl::StrCat("decays[", k, "] must be in [0, 1], got ", decay));
    }
    rates->push_back(1 - decay);
  }
  return absl::OkStatus();
}

// Serves resource and ref variables: `Variables` knows the difference.
class EmaUpdateOp : public OpKernel {
 public:
  explicit EmaUpdateOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &value_dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("S", &shadow_dtype_));
    int shadows;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("NK", &shadows));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &n_));
    OP_REQUIRES(ctx, shadows % n_ == 0,
                absl::InvalidArgumentError(
                    absl::StrCat("shadows must be N * K variables for N = ",
                                 n_, " values, got ", shadows)));
    averages_ = shadows / n_;
    Isa isa;
    std::string error;
    OP_REQUIRES(ctx, ChosenIsa(&isa, &error),
                absl::InvalidArgumentError(error));
    step_ = FindStep(RuleId::kEma, NumberOf(shadow_dtype_),
                     NumberOf(value_dtype_), isa);
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<double> rates;
    OP_REQUIRES_OK(ctx,
                   RatesFromDecays(ctx->input(ctx->num_inputs() - 1),
                                   averages_, &rates));
    Variables variables(ctx);
    int shadows, values;
    OP_REQUIRES_OK(
        ctx, variables.Find("shadows", Variables::Access::kWrite, &shadows));
    OP_REQUIRES_OK(
        ctx, variables.Find("values", Variables::Access::kRead, &values));
    OP_REQUIRES_OK(ctx, variables.Lock());

    for (int i = 0; i < n_; ++i) {
      OP_REQUIRES_OK(ctx, variables.CheckDtype(values + i, value_dtype_));
      for (int k = 0; k < averages_; ++k) {
        const int shadow = shadows + k * n_ + i;
        OP_REQUIRES_OK(ctx, variables.CheckDtype(shadow, shadow_dtype_));
        OP_REQUIRES_OK(ctx, variables.CheckSameShape(shadow, values + i));
      }
    }
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite());

    // Read and write of a shadow; the value comes from memory once for all.
    const size_t shadow_bytes = 2 * SizeOf(NumberOf(shadow_dtype_));
    const size_t value_bytes = SizeOf(NumberOf(value_dtype_));
    Pass pass;
    for (int k = 0; k < averages_; ++k) {
      pass.AddStage(
          {step_, &rates[k], 2, shadow_bytes + (k == 0 ? value_bytes : 0)});
    }
    std::vector<void*> operands;
    for (int i = 0; i < n_; ++i) {
      operands.clear();
      for (int k = 0; k < averages_; ++k) {
        operands.push_back(variables.data(shadows + k * n_ + i));
        operands.push_back(variables.data(values + i));
      }
      pass.AddVariable(variables.size(values + i), operands);
    }
    RunPass(ctx, pass);
  }

 private:
  tensorflow::DataType value_dtype_;
  tensorflow::DataType shadow_dtype_;
  int n_;
  int averages_;
  StepFn step_;
};

#define REGISTER(T_, S_)                                    \
  REGISTER_KERNEL_BUILDER(Name("Wrapopt>EmaUpdate")         \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T_>("T")      \
                              .TypeConstraint<S_>("S"),     \
                          EmaUpdateOp);                     \
  REGISTER_KERNEL_BUILDER(Name("Wrapopt>EmaUpdateRef")      \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T_>("T")      \
                              .TypeConstraint<S_>("S"),     \
                          EmaUpdateOp)
REGISTER(Eigen::half, Eigen::half);
REGISTER(Eigen::half, float);
REGISTER(Eigen::bfloat16, Eigen::bfloat16);
REGISTER(Eigen::bfloat16, float);
REGISTER(float, float);
REGISTER(double, double);
#undef REGISTER

}  // namespace
}  // namespace wrapopt
