#include "cc/kernels/averages.h"

#include "absl/strings/str_cat.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/errors.h"

namespace wrapopt {

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

absl::Status Averages::Init(tensorflow::OpKernelConstruction* ctx, Isa isa) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("T", &value_dtype_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("S", &shadow_dtype_));
  int shadows;
  TF_RETURN_IF_ERROR(ctx->GetAttr("NK", &shadows));
  TF_RETURN_IF_ERROR(ctx->GetAttr("N", &n_));
  if (shadows % n_ != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("shadows must be N * K variables for N = ", n_,
                     " values, got ", shadows));
  }
  k_ = shadows / n_;
  step_ = FindStep(RuleId::kEma, NumberOf(shadow_dtype_),
                   NumberOf(value_dtype_), isa);
  const bool fits = step_ != nullptr &&
                    (shadow_dtype_ == value_dtype_ ||
                     shadow_dtype_ == tensorflow::DT_FLOAT);
  if (k_ > 0 && !fits) {
    return absl::InvalidArgumentError(absl::StrCat(
        "shadows must be of dtype ", tensorflow::DataTypeString(value_dtype_),
        ", the values', or float for half and bfloat16, got ",
        tensorflow::DataTypeString(shadow_dtype_)));
  }
  return absl::OkStatus();
}

absl::Status Averages::ReadDecays(tensorflow::OpKernelContext* ctx,
                                  std::vector<double>* rates) const {
  const tensorflow::Tensor* decays;
  TF_RETURN_IF_ERROR(ctx->input("decays", &decays));
  if (decays->dims() != 1 || decays->NumElements() != k_) {
    return absl::InvalidArgumentError(
        absl::StrCat("decays misshapen: got ", decays->shape().DebugString(),
                     " but expected [", k_,
                     "] (one decay for each shadow of a value)"));
  }
  for (int64_t k = 0; k < k_; ++k) {
    const double decay = decays->vec<double>()(k);
    if (!(decay >= 0 && decay <= 1)) {
      return absl::InvalidArgumentError(
          absl::StrCat("decays[", k, "] must be in [0, 1], got ", decay));
    }
    rates->push_back(1 - decay);
  }
  return absl::OkStatus();
}

absl::Status Averages::Check(const Variables& variables, int shadows,
                             int values) const {
  for (int i = 0; i < n_; ++i) {
    TF_RETURN_IF_ERROR(variables.CheckDtype(values + i, value_dtype_));
    for (int k = 0; k < k_; ++k) {
      const int shadow = shadows + k * n_ + i;
      TF_RETURN_IF_ERROR(variables.CheckDtype(shadow, shadow_dtype_));
      TF_RETURN_IF_ERROR(variables.CheckSameShape(shadow, values + i));
    }
  }
  return absl::OkStatus();
}

void Averages::AddStages(const std::vector<double>& rates, size_t value_bytes,
                         Pass* pass) const {
  const size_t shadow_bytes = 2 * SizeOf(NumberOf(shadow_dtype_));
  for (int k = 0; k < k_; ++k) {
    pass->AddStage(
        {step_, &rates[k], 2, shadow_bytes + (k == 0 ? value_bytes : 0),
         k == 0 && value_bytes > 0});
  }
}

void Averages::AddOperands(Variables* variables, int shadows, int values,
                           int i, std::vector<void*>* operands) const {
  for (int k = 0; k < k_; ++k) {
    operands->push_back(variables->data(shadows + k * n_ + i));
    operands->push_back(variables->data(values + i));
  }
}

}  // namespace wrapopt
