// The shadows of an op's variables: what EmaUpdate and the Apply ops share.
#ifndef WRAPOPT_CC_KERNELS_AVERAGES_H_
#define WRAPOPT_CC_KERNELS_AVERAGES_H_

#include <vector>

#include "absl/status/status.h"
#include "cc/kernels/contracts.h"
#include "cc/kernels/elementwise_cpu.h"
#include "cc/kernels/isa.h"
#include "cc/kernels/number.h"
#include "cc/kernels/variables.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {

Number NumberOf(tensorflow::DataType dtype);

// How the CPU updates K averages of each of an op's N values.
class Averages : public ShadowContract {
 public:
  absl::Status Init(tensorflow::OpKernelConstruction* ctx, Isa isa);

  // The op's input "decays" as rates.
  absl::Status ReadDecays(tensorflow::OpKernelContext* ctx,
                          std::vector<double>* rates) const;

  // One stage for each decay; `value_bytes` is what the first of them pays for
  // reading an element of the value.
  void AddStages(const std::vector<double>& rates, size_t value_bytes,
                 Pass* pass) const;

  // The operands of these stages for value `i`.
  void AddOperands(Variables* variables, int shadows, int values, int i,
                   std::vector<void*>* operands) const;

 private:
  RuleStep step_;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_AVERAGES_H_
