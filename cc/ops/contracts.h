// The rules that the inputs of the ops must meet, and the errors of inputs that
// break them.
//
// Each rule is written once. The kernels of all back ends apply it when an op
// runs. The op's shape function applies it to what is known while a graph is
// built. A shape or dtype that is not known breaks no rule.
#ifndef WRAPOPT_CC_OPS_CONTRACTS_H_
#define WRAPOPT_CC_OPS_CONTRACTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {

// "subject misshapen: got [3] but expected [4] (the shape of x)".
absl::Status Misshapen(absl::string_view subject,
                       const tensorflow::PartialTensorShape& got,
                       absl::string_view expected, absl::string_view why);

absl::Status CheckShape(absl::string_view subject,
                        const tensorflow::PartialTensorShape& got,
                        const tensorflow::PartialTensorShape& expected,
                        absl::string_view why);

absl::Status CheckScalar(absl::string_view name,
                         const tensorflow::PartialTensorShape& shape);

// Checks indices[i], the rows of a variable.
absl::Status CheckIndices(int i, const tensorflow::PartialTensorShape& shape);

// Whether gradients, shadows or sources of a variable of dtype `dtype` may have
// dtype `other`: the same, or float for half and bfloat16.
bool FitsLowPrecision(tensorflow::DataType other, tensorflow::DataType dtype);

// Some of an op's input "variables", which has several lists one after the
// other. A tensor of the input may hold the handles of several variables.
struct VariableList {
  absl::string_view name;
  int count;
  bool is_read = false;  // And not written.
  // The dtype of variables that need no value.
  tensorflow::DataType made_of = tensorflow::DT_INVALID;
};

// Checks the number of variables in the input "variables".
absl::Status CheckCount(const std::vector<VariableList>& lists, int64_t got);

// The facts about an op's variables that checks need. A variable is identified
// by its position in all lists of the op that were looked up.
class CheckedVariables {
 public:
  // "values[3]", and when the op runs, "values[3] (variable 'w')".
  virtual std::string Describe(int variable) const = 0;
  // DT_INVALID if it is not known.
  virtual tensorflow::DataType known_dtype(int variable) const = 0;
  virtual const tensorflow::PartialTensorShape& known_shape(
      int variable) const = 0;
  // For a variable that is read and may also be written: the position of the
  // written one, or -1.
  virtual int Written(int variable) const = 0;

  absl::Status CheckDtype(int variable, tensorflow::DataType dtype) const;
  absl::Status CheckShape(int variable,
                          const tensorflow::PartialTensorShape& expected,
                          absl::string_view why) const;
  // `variable` must have the shape of `like`.
  absl::Status CheckSameShape(int variable, int like) const;
  // The tensor `list[position]` must have the shape of `like`.
  absl::Status CheckSameShape(const tensorflow::PartialTensorShape& shape,
                              const char* list, int position, int like) const;
  absl::Status CheckHasRows(int variable) const;

  // Checks the dtype of `count` variables from `first` on, and counts their
  // elements: -1 if that is not known.
  absl::Status CountElements(int first, int count, tensorflow::DataType dtype,
                             int64_t* elements) const;

 protected:
  ~CheckedVariables() = default;

  absl::Status NotInitialized(int variable) const;
  // The error if two positions are one variable and at least one is written.
  absl::Status NamedTwice(int a, int b) const;
};

// Converts decays to rates 1 - decay, in double: the relative error of
// 1 - 0.9999 in float is 1.7e-5.
absl::Status ToRates(absl::Span<const double> decays,
                     std::vector<double>* rates);

// The shadows of EmaUpdate and of Apply: K averages of each of N values, in the
// order of the op's input: all N of the first decay, then all N of the second,
// and so on.
class ShadowContract {
 public:
  // Reads the attributes N, NK, T (of the values), S (of the shadows) and, if
  // the op has them, NL and NI. A context is one of a kernel's construction or
  // of a shape function, here and below.
  template <class Context>
  absl::Status Init(Context* ctx);

  // The lists of EmaUpdate's input "variables".
  std::vector<VariableList> Lists() const {
    return {{"shadows", count()}, {"values", n_, /*is_read=*/true}};
  }

  // Checks the shape of the input "decays", and its value if that is known.
  absl::Status CheckDecays(const tensorflow::PartialTensorShape& shape,
                           const tensorflow::Tensor* value = nullptr) const;
  // Converts the input "decays" to rates.
  absl::Status ToRates(const tensorflow::Tensor& decays,
                       std::vector<double>* rates) const;

  // log(decay), but a finite number for a decay of 0.
  static double LogOf(double decay);

  // Checks the dtypes and shapes of the shadows and the dtypes of their values.
  absl::Status Check(const CheckedVariables& variables, int shadows,
                     int values) const;

  // Whether the input "log_decays" is not empty, so that rows of the shadows
  // may lag behind.
  bool lazy() const { return lazy_; }
  // Checks their dtypes and shapes.
  absl::Status CheckLogDecays(const CheckedVariables& variables,
                              int log_decays, int values) const;
  // The number of log decays besides one for each row: see LazyAverage.
  static constexpr int64_t kMoreLogDecays = 2;
  // The shape of the log decays of `value`, which must have rows.
  static absl::Status ShapeOfLogDecays(const CheckedVariables& variables,
                                       int value,
                                       tensorflow::PartialTensorShape* shape);

  int values() const { return n_; }
  int per_value() const { return k_; }
  int count() const { return n_ * k_; }
  tensorflow::DataType value_dtype() const { return value_dtype_; }
  tensorflow::DataType shadow_dtype() const { return shadow_dtype_; }

 private:
  int n_;
  int k_;
  bool lazy_ = false;
  tensorflow::DataType value_dtype_;
  tensorflow::DataType shadow_dtype_;
};

// The rule of that name, which updates a `var` by a `grad`.
absl::Status FindUpdate(absl::string_view name, const RuleInfo** rule);

// Apply, except for its shadows. The input "variables" begins with the rule's
// states, N of each, and then those of the policy.
class ApplyContract {
 public:
  // Reads the attributes rule, policy, N, NI, NO, T (of the variables), G (of
  // the gradients), O (of the origins). Checks that no rows of averages may lag
  // behind if a step moves all rows.
  template <class Context>
  absl::Status Init(Context* ctx, const ShadowContract& averages);

  // The lists of the input "variables".
  std::vector<VariableList> Lists(const ShadowContract& averages) const;
  // Their first positions. Those of a rule's state and of a policy's state:
  int state(int s) const { return s * n_; }
  int memory(int m) const { return state(states_.size() + m); }
  int shadows() const { return memory(memory_states()); }
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
  // Checks origins[i], of the shape of grad[i].
  absl::Status CheckOrigins(int i,
                            const tensorflow::PartialTensorShape& shape,
                            const tensorflow::PartialTensorShape& grad) const;

  const RuleInfo& rule() const { return *rule_; }
  // How gradients are compensated for their age; nullptr if they are not.
  const PolicyInfo* policy() const { return policy_; }
  bool sparse() const { return sparse_; }
  int variables() const { return n_; }
  // The numbers of states of a variable.
  int rule_states() const { return states_.size(); }
  int memory_states() const {
    return policy_ == nullptr ? 0 : policy_->states();
  }
  // The numbers of scalars in the input "scalars": the rule's, then the
  // policy's.
  int rule_scalars() const { return CountNames(rule_->scalars); }
  int policy_scalars() const {
    return policy_ == nullptr ? 0 : policy_->scalars();
  }
  tensorflow::DataType dtype() const { return dtype_; }
  tensorflow::DataType grad_dtype() const { return grad_dtype_; }
  // That in which the gradients of a row are summed and compensated, and that
  // of the policy's states.
  tensorflow::DataType compute_dtype() const {
    return dtype_ == tensorflow::DT_DOUBLE ? tensorflow::DT_DOUBLE
                                           : tensorflow::DT_FLOAT;
  }

 private:
  const RuleInfo* rule_ = nullptr;
  const PolicyInfo* policy_ = nullptr;
  std::vector<absl::string_view> states_;
  bool sparse_;
  int n_;
  tensorflow::DataType dtype_;
  tensorflow::DataType grad_dtype_;
};

class AveragingAssignContract {
 public:
  // Reads the attributes N and T and those that tell the lengths of the lists.
  template <class Context>
  absl::Status Init(Context* ctx);

  // Checks the input "rate".
  absl::Status CheckRate(double rate) const;
  // Checks the shape of the input "weights", and its value if that is known.
  absl::Status CheckWeights(const tensorflow::PartialTensorShape& shape,
                            const tensorflow::Tensor* value = nullptr) const;

  // Checks dtypes and shapes, and that a target is a source only of its own
  // mean.
  absl::Status CheckVariables(const CheckedVariables& variables, int targets,
                              int sources) const;
  absl::Status CheckTensor(const CheckedVariables& variables, int targets,
                           int position, tensorflow::DataType dtype,
                           tensorflow::DataType first_of_row,
                           const tensorflow::PartialTensorShape& shape) const;

  int variables() const { return n_; }
  // The numbers for each variable.
  int targets() const { return targets_; }
  int sources() const { return sources_; }
  int tensors() const { return tensors_; }
  // The dtype of the sums.
  tensorflow::DataType sum_dtype() const {
    return dtype_ == tensorflow::DT_DOUBLE ? tensorflow::DT_DOUBLE
                                           : tensorflow::DT_FLOAT;
  }

 private:
  // Counts the rows of N in an input list of `count`.
  absl::Status CountRows(const char* list, int count, int* rows) const;
  // A dtype must be the op's, or float if the op's is half or bfloat16, and the
  // dtype of the first of its row.
  bool FitsRow(tensorflow::DataType got, tensorflow::DataType first) const;
  absl::Status DtypeError(const std::string& subject, tensorflow::DataType got,
                          const std::string& first_subject,
                          tensorflow::DataType first) const;
  absl::Status CheckVariable(const CheckedVariables& variables, int targets,
                             int first, int variable) const;

  int n_;
  int targets_, sources_, tensors_;
  tensorflow::DataType dtype_;
};

// Checks that `a` and `b` can exchange values.
absl::Status CheckSwap(const CheckedVariables& variables, int a, int b);

// Checks the shape of the input "packed" of `count` variables, which have this
// number of elements, -1 if it is not known.
absl::Status CheckPacked(const tensorflow::PartialTensorShape& shape, int count,
                         int64_t elements);

// Check the variables of the staleness ops.
absl::Status CheckStep(const CheckedVariables& variables, int step);
absl::Status CheckGate(const CheckedVariables& variables, int step, int counter,
                       int histogram);

// Check the inputs "timeout_secs" and "workers" of the averaging ops.
absl::Status CheckTimeout(double timeout_secs);
absl::Status CheckWorkers(const tensorflow::PartialTensorShape& shape);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_OPS_CONTRACTS_H_
