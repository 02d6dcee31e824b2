// What the ops ask of their inputs, and what they say where it is not so: in
// one place, for the kernels of all back ends.
#ifndef WRAPOPT_CC_KERNELS_CONTRACTS_H_
#define WRAPOPT_CC_KERNELS_CONTRACTS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {

// An op's variables, as far as a check needs to know them. A variable is called
// by its position in all lists of the op that were looked up.
class CheckedVariables {
 public:
  // "values[3] (variable 'w')".
  virtual std::string Describe(int variable) const = 0;
  virtual tensorflow::DataType dtype(int variable) const = 0;
  virtual const tensorflow::TensorShape& shape(int variable) const = 0;
  // Of one that is read and may be written, too: which of the written ones it
  // is, or -1.
  virtual int Written(int variable) const = 0;

  absl::Status CheckDtype(int variable, tensorflow::DataType dtype) const;
  // `variable` must have the shape of `like`.
  absl::Status CheckSameShape(int variable, int like) const;
  // So must the tensor that is `list[position]`.
  absl::Status CheckSameShape(const tensorflow::TensorShape& shape,
                              const char* list, int position, int like) const;

 protected:
  ~CheckedVariables() = default;

  absl::Status NotInitialized(int variable) const;
  // For two that are one variable, of which both are written, or one is and the
  // other may not be.
  absl::Status NamedTwice(int a, int b) const;
};

absl::Status CheckScalar(absl::string_view name,
                         const tensorflow::TensorShape& shape);

// What the input "decays" holds, as rates 1 - decay, in double: 1 - 0.9999 in
// float is off by 1.7e-5.
absl::Status ToRates(absl::Span<const double> decays,
                     std::vector<double>* rates);

// The shadows of EmaUpdate and of the Apply ops: K averages of each of N
// values, in the order of the op's input: all N of the first decay, then all N
// of the second, and so on.
class ShadowContract {
 public:
  // Reads the attributes N, NK, T (of the values) and S (of the shadows).
  absl::Status Init(tensorflow::OpKernelConstruction* ctx);

  // The input "decays".
  absl::Status CheckDecays(const tensorflow::TensorShape& shape) const;
  // What it holds, as rates.
  absl::Status ToRates(const tensorflow::Tensor& decays,
                       std::vector<double>* rates) const;

  // The same as log(decay), of a decay of 0 as a number that is small enough.
  static double LogOf(double decay);

  // Dtypes and shapes of the shadows and the dtypes of their values.
  absl::Status Check(const CheckedVariables& variables, int shadows,
                     int values) const;

  // Whether there is an input "log_decays" that is not empty: rows of the
  // shadows may lag behind.
  bool lazy() const { return lazy_; }
  // The shape of the log decays of `value`, which must have rows.
  static absl::Status ShapeOfLogDecays(const CheckedVariables& variables,
                                       int value,
                                       tensorflow::TensorShape* shape);

  int values() const { return n_; }
  int per_value() const { return k_; }
  tensorflow::DataType value_dtype() const { return value_dtype_; }
  tensorflow::DataType shadow_dtype() const { return shadow_dtype_; }

 private:
  int n_;
  int k_;
  bool lazy_ = false;
  tensorflow::DataType value_dtype_;
  tensorflow::DataType shadow_dtype_;
};

// The Apply ops, but for what is in ShadowContract.
class ApplyContract {
 public:
  // How an op takes the scalars of its rule: as inputs and attributes, or all
  // of them in one input, the vector "scalars".
  enum class Scalars { kByName, kVector };

  // One scalar of the rule: an input of the op, or an attribute that is 1 or 0.
  struct Scalar {
    std::string name;
    bool is_attribute;
    double attribute;
  };

  // Reads the attributes N, T (of the variables), G (of the gradients) and those
  // that are scalars of the rule.
  absl::Status Init(tensorflow::OpKernelConstruction* ctx,
                    const RuleInfo& rule, Scalars scalars = Scalars::kByName);

  // The input "scalars".
  absl::Status CheckScalars(const tensorflow::TensorShape& shape) const;

  // Whether rows of averages may lag behind: not where a step moves them all.
  absl::Status CheckLazy(const ShadowContract& averages,
                         const RuleInfo& rule) const;

  // The states, `states` being the first of each list.
  absl::Status CheckStates(const CheckedVariables& variables,
                           const std::vector<int>& states) const;
  // A sparse gradient of `var`.
  absl::Status CheckRows(const CheckedVariables& variables, int var, int i,
                         const tensorflow::TensorShape& grad,
                         const tensorflow::TensorShape& indices) const;

  const std::vector<std::string>& states() const { return states_; }
  const std::vector<Scalar>& scalars() const { return scalars_; }
  int variables() const { return n_; }
  tensorflow::DataType dtype() const { return dtype_; }
  tensorflow::DataType grad_dtype() const { return grad_dtype_; }

 private:
  std::vector<std::string> states_;
  std::vector<Scalar> scalars_;
  int n_;
  tensorflow::DataType dtype_;
  tensorflow::DataType grad_dtype_;
};

class AveragingAssignContract {
 public:
  // Reads the attributes N and T and counts the inputs of `op`.
  absl::Status Init(tensorflow::OpKernelConstruction* ctx,
                    const tensorflow::OpKernel& op);

  // The inputs "rate" and "weights", and what they hold.
  absl::Status CheckRate(double rate) const;
  absl::Status CheckWeights(const tensorflow::TensorShape& shape) const;
  absl::Status CheckWeight(int source, double weight) const;

  // Dtypes and shapes, and that a target is a source only of its own mean.
  absl::Status CheckVariables(const CheckedVariables& variables, int targets,
                              int sources) const;
  absl::Status CheckTensor(const CheckedVariables& variables, int targets,
                           int position, tensorflow::DataType dtype,
                           tensorflow::DataType first_of_row,
                           const tensorflow::TensorShape& shape) const;

  int variables() const { return n_; }
  // For each of the variables.
  int targets() const { return targets_; }
  int sources() const { return sources_; }
  int tensors() const { return tensors_; }
  // The dtype of the sums.
  tensorflow::DataType sum_dtype() const {
    return dtype_ == tensorflow::DT_DOUBLE ? tensorflow::DT_DOUBLE
                                           : tensorflow::DT_FLOAT;
  }

 private:
  // How many rows of N an input list has.
  absl::Status CountRows(const tensorflow::OpKernel& op, const char* list,
                         int* rows) const;
  // For a dtype that is not the op's, nor float where that is half or bfloat16,
  // or not that of the first of its row.
  absl::Status DtypeError(const std::string& subject, tensorflow::DataType got,
                          const std::string& first_subject,
                          tensorflow::DataType first) const;
  absl::Status CheckVariable(const CheckedVariables& variables, int targets,
                             int first, int variable) const;

  int n_;
  int targets_, sources_, tensors_;
  tensorflow::DataType dtype_;
};

// `a` and `b` may trade values.
absl::Status CheckExchange(const CheckedVariables& variables, int a, int b);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_CONTRACTS_H_
