// The shadows of an op's variables: what EmaUpdate and the Apply ops share.
#ifndef WRAPOPT_CC_KERNELS_AVERAGES_H_
#define WRAPOPT_CC_KERNELS_AVERAGES_H_

#include <vector>

#include "absl/status/status.h"
#include "cc/kernels/elementwise_cpu.h"
#include "cc/kernels/isa.h"
#include "cc/kernels/lazy_average.h"
#include "cc/kernels/number.h"
#include "cc/kernels/variables.h"
#include "cc/ops/contracts.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {

// One stage of `pass` for each of a value's averages; `value_bytes` is what the
// first of them pays for reading an element of the value.
void AddAverages(const RuleStep& step, const std::vector<double>& rates,
                 size_t value_bytes, Pass* pass);

// How the CPU updates K averages of each of an op's N values.
class Averages : public ShadowContract {
 public:
  absl::Status Init(tensorflow::OpKernelConstruction* ctx, Isa isa);

  // The op's input "log_decays", and what it must be.
  absl::Status FindLogDecays(Variables* variables, int* first) const;
  absl::Status CheckLogDecays(Variables* variables, int first,
                              int values) const;

  // The op's input "decays" as rates, and as logarithms.
  absl::Status ReadDecays(tensorflow::OpKernelContext* ctx,
                          std::vector<double>* rates,
                          std::vector<double>* logs = nullptr) const;

  void AddStages(const std::vector<double>& rates, size_t value_bytes,
                 Pass* pass) const {
    AddAverages(step_, rates, value_bytes, pass);
  }

  // Logs an error if rows of an average of a value lag behind and something
  // else than a step has replaced the value.
  void WarnIfReplaced(const Variables& variables, int value,
                      const std::vector<LazyAverage>& averages) const;

  // The operands of these stages for value `i`.
  void AddOperands(Variables* variables, int shadows, int values, int i,
                   std::vector<void*>* operands) const;

  // The averages of value `i`, which may lag behind, in the step of these
  // decays; none in no step. `log_decays` is the first of that input's.
  std::vector<LazyAverage> OfValue(Variables* variables, int shadows,
                                   int values, int log_decays, int i,
                                   const std::vector<double>& rates,
                                   const std::vector<double>& logs) const;

 private:
  RuleStep step_;
  MoveRowsFn move_;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_AVERAGES_H_
