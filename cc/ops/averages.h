// The contract of averages: of EmaUpdate, of Apply, and of the ops of averages
// whose rows may lag behind.
#ifndef WRAPOPT_CC_OPS_AVERAGES_H_
#define WRAPOPT_CC_OPS_AVERAGES_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cc/ops/contracts.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {

// Converts decays to rates 1 - decay, in double: the relative error of
// 1 - 0.9999 in float is 1.7e-5.
absl::Status ToRates(absl::Span<const double> decays,
                     std::vector<double>* rates);

// K averages of each of N values, in the
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

}  // namespace wrapopt

#endif  // WRAPOPT_CC_OPS_AVERAGES_H_
