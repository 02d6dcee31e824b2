#ifndef WRAPOPT_CC_OPS_APPLY_H_
#define WRAPOPT_CC_OPS_APPLY_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cc/ops/averages.h"
#include "cc/ops/contracts.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {

// The rule of that name, which updates a `var` by a `grad`.
absl::Status FindUpdate(absl::string_view name, const RuleInfo** rule);

// Apply, except for its shadows. The input "variables" begins with the rule's
// states, N of each.
class ApplyContract {
 public:
  // Reads the attributes rule, N, NI, T (of the variables), G (of the
  // gradients). Checks that no rows of averages may lag behind if a step moves
  // all rows.
  template <class Context>
  absl::Status Init(Context* ctx, const ShadowContract& averages);

  // The lists of the input "variables".
  std::vector<VariableList> Lists(const ShadowContract& averages) const;
  // The first position of each list: of state s of the rule,
  int state(int s) const { return s * n_; }
  int shadows() const { return state(states_.size()); }
  int log_decays(const ShadowContract& averages) const {
    return shadows() + averages.count();
  }

  // Checks the variables, which are in this order.
  absl::Status CheckVariables(const CheckedVariables& variables,
                              const ShadowContract& averages) const;

  // Checks the shape of the input "scalars".
  absl::Status CheckScalars(const tensorflow::PartialTensorShape& shape) const;
  // Checks a sparse gradient of variable `i`.
  absl::Status CheckRows(const CheckedVariables& variables, int i,
                         const tensorflow::PartialTensorShape& grad,
                         const tensorflow::PartialTensorShape& indices) const;

  const RuleInfo& rule() const { return *rule_; }
  bool sparse() const { return sparse_; }
  int variables() const { return n_; }
  // The number of states of a variable.
  int states() const { return states_.size(); }
  // The number of scalars in the input "scalars".
  int scalars() const { return CountNames(rule_->scalars); }
  tensorflow::DataType dtype() const { return dtype_; }
  tensorflow::DataType grad_dtype() const { return grad_dtype_; }
  // That in which the gradients of a row are summed.
  tensorflow::DataType compute_dtype() const {
    return dtype_ == tensorflow::DT_DOUBLE ? tensorflow::DT_DOUBLE
                                           : tensorflow::DT_FLOAT;
  }

 private:
  const RuleInfo* rule_ = nullptr;
  std::vector<absl::string_view> states_;
  bool sparse_;
  int n_;
  tensorflow::DataType dtype_;
  tensorflow::DataType grad_dtype_;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_OPS_APPLY_H_
