#include "cc/kernels/averages.h"

#include "cc/kernels/inputs.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/logging.h"

namespace wrapopt {

void AddAverages(const RuleStep& step, const std::vector<double>& rates,
                 size_t value_bytes, Pass* pass) {
  for (const double& rate : rates) {
    pass->AddStage({step, &rate, 2, 2 * SizeOf(step.state) + value_bytes,
                    value_bytes > 0});
    // The first stage that runs reads the value.
    if (!pass->stages().back().is_idle()) value_bytes = 0;
  }
}

absl::Status Averages::Init(tensorflow::OpKernelConstruction* ctx, Isa isa) {
  TF_RETURN_IF_ERROR(ShadowContract::Init(ctx));
  step_ = FindStep(RuleId::kEma, NumberOf(shadow_dtype()),
                   NumberOf(value_dtype()), isa);
  move_ =
      FindMoveRows(NumberOf(shadow_dtype()), NumberOf(value_dtype()), isa);
  return absl::OkStatus();
}

void Averages::ShapeLogDecays(Variables* variables, int log_decays,
                              int values) const {
  for (int at = 0; lazy() && at < count(); ++at) {
    const int value = values + at % this->values();
    variables->SetShape(
        log_decays + at,
        {variables->shape(value).dim_size(0) + kMoreLogDecays});
  }
}

absl::Status Averages::ReadDecays(tensorflow::OpKernelContext* ctx,
                                  std::vector<double>* rates,
                                  std::vector<double>* logs) const {
  const tensorflow::Tensor* decays;
  TF_RETURN_IF_ERROR(ctx->input("decays", &decays));
  TF_RETURN_IF_ERROR(ToRates(*decays, rates));
  for (int k = 0; logs != nullptr && k < per_value(); ++k) {
    logs->push_back(LogOf(decays->vec<double>()(k)));
  }
  return absl::OkStatus();
}

void Averages::WarnIfReplaced(const Variables& variables, int value,
                              const std::vector<LazyAverage>& averages) const {
  for (const LazyAverage& average : averages) {
    if (!average.IsValueReplaced()) continue;
    LOG(ERROR) << "Rows of an average of " << variables.Describe(value)
               << " lagged behind when something else than its optimizer "
                  "replaced the variable. They move towards the new value now, "
                  "and the average is wrong. Read the average before you "
                  "change the variable, or make the optimizer with lazy=False.";
    average.step_value() = average.Address();
  }
}

void Averages::LeaveIdle(const std::vector<double>& rates, int shadows,
                         Variables* variables) const {
  for (int k = 0; k < per_value(); ++k) {
    for (int i = 0; rates[k] == 0 && i < values(); ++i) {
      variables->Leave(shadows + k * values() + i);
    }
  }
}

void Averages::AddOperands(Variables* variables, int shadows, int values,
                           int i, std::vector<void*>* operands) const {
  for (int k = 0; k < per_value(); ++k) {
    operands->push_back(variables->data(shadows + k * this->values() + i));
    operands->push_back(variables->data(values + i));
  }
}

std::vector<LazyAverage> Averages::OfValue(
    Variables* variables, int shadows, int values, int log_decays, int i,
    const std::vector<double>& rates, const std::vector<double>& logs) const {
  std::vector<LazyAverage> result;
  const tensorflow::Tensor& value = *variables->tensor(values + i);
  const int64_t rows = value.dim_size(0);
  for (int k = 0; k < per_value(); ++k) {
    const int at = k * this->values() + i;
    result.push_back(
        {move_, static_cast<char*>(variables->data(shadows + at)),
         static_cast<const char*>(variables->data(values + i)),
         SizeOf(NumberOf(shadow_dtype())), SizeOf(NumberOf(value_dtype())),
         rows, rows == 0 ? 0 : value.NumElements() / rows,
         static_cast<double*>(variables->data(log_decays + at)),
         rates.empty() ? 0 : rates[k], logs.empty() ? 0 : logs[k]});
  }
  return result;
}

}  // namespace wrapopt
