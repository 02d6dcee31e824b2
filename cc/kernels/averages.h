// The shadows of an op's variables: what EmaUpdate and the Apply ops share.
#ifndef WRAPOPT_CC_KERNELS_AVERAGES_H_
#define WRAPOPT_CC_KERNELS_AVERAGES_H_

#include <vector>

#include "absl/status/status.h"
#include "cc/kernels/elementwise_cpu.h"
#include "cc/kernels/isa.h"
#include "cc/kernels/number.h"
#include "cc/kernels/variables.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {

Number NumberOf(tensorflow::DataType dtype);

// K averages of each of an op's N values. `shadows` are the op's, in the order
// of its input: all N of the first decay, then all N of the second, and so on.
class Averages {
 public:
  // Reads the attributes N, NK, T (of the values) and S (of the shadows).
  absl::Status Init(tensorflow::OpKernelConstruction* ctx, Isa isa);

  // The op's input "decays" as rates 1 - decay, in double: 1 - 0.9999 in float
  // is off by 1.7e-5.
  absl::Status ReadDecays(tensorflow::OpKernelContext* ctx,
                          std::vector<double>* rates) const;

  // Dtypes and shapes of the shadows and the dtypes of their values.
  absl::Status Check(const Variables& variables, int shadows,
                     int values) const;

  // One stage for each decay; `value_bytes` is what the first of them pays for
  // reading an element of the value.
  void AddStages(const std::vector<double>& rates, size_t value_bytes,
                 Pass* pass) const;

  // The operands of these stages for value `i`.
  void AddOperands(Variables* variables, int shadows, int values, int i,
                   std::vector<void*>* operands) const;

  int values() const { return n_; }
  int per_value() const { return k_; }
  tensorflow::DataType value_dtype() const { return value_dtype_; }

 private:
  int n_;
  int k_;
  tensorflow::DataType value_dtype_;
  tensorflow::DataType shadow_dtype_;
  RuleStep step_;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_AVERAGES_H_
