#include "cc/kernels/averages.h"

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
  TF_RETURN_IF_ERROR(ShadowContract::Init(ctx));
  step_ = FindStep(RuleId::kEma, NumberOf(shadow_dtype()),
                   NumberOf(value_dtype()), isa);
  return absl::OkStatus();
}

absl::Status Averages::ReadDecays(tensorflow::OpKernelContext* ctx,
                                  std::vector<double>* rates) const {
  const tensorflow::Tensor* decays;
  TF_RETURN_IF_ERROR(ctx->input("decays", &decays));
  return ToRates(*decays, rates);
}

void Averages::AddStages(const std::vector<double>& rates, size_t value_bytes,
                         Pass* pass) const {
  const size_t shadow_bytes = 2 * SizeOf(NumberOf(shadow_dtype()));
  for (int k = 0; k < per_value(); ++k) {
    pass->AddStage(
        {step_, &rates[k], 2, shadow_bytes + (k == 0 ? value_bytes : 0),
         k == 0 && value_bytes > 0});
  }
}

void Averages::AddOperands(Variables* variables, int shadows, int values,
                           int i, std::vector<void*>* operands) const {
  for (int k = 0; k < per_value(); ++k) {
    operands->push_back(variables->data(shadows + k * this->values() + i));
    operands->push_back(variables->data(values + i));
  }
}

}  // namespace wrapopt
