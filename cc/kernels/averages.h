// The averages of an op's variables, for EmaUpdate and Apply.
#ifndef WRAPOPT_CC_KERNELS_AVERAGES_H_
#define WRAPOPT_CC_KERNELS_AVERAGES_H_

#include <vector>

#include "absl/status/status.h"
#include "cc/engine/elementwise.h"
#include "cc/engine/isa.h"
#include "cc/engine/lazy_average.h"
#include "cc/engine/number.h"
#include "cc/kernels/variables.h"
#include "cc/ops/averages.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {

// Adds a stage to `pass` for each average of a value. `value_bytes` is the size
// of an element of the value, or 0 if an earlier stage has read the value.
void AddAverages(const RuleStep& step, const std::vector<double>& rates,
                 size_t value_bytes, Pass* pass);

// K averages of each of an op's N values.
class Averages : public ShadowContract {
 public:
  absl::Status Init(tensorflow::OpKernelConstruction* ctx, Isa isa);

  // Sets the shapes of log decays without a value.
  void ShapeLogDecays(Variables* variables, int log_decays, int values) const;

  // Reads the op's input "decays", as rates and as logarithms.
  absl::Status ReadDecays(tensorflow::OpKernelContext* ctx,
                          std::vector<double>* rates,
                          std::vector<double>* logs = nullptr) const;

  // Makes PrepareToWrite() leave averages alone that move by a rate of 0.
  void LeaveIdle(const std::vector<double>& rates, int shadows,
                 Variables* variables) const;

  void AddStages(const std::vector<double>& rates, size_t value_bytes,
                 Pass* pass) const {
    AddAverages(step_, rates, value_bytes, pass);
  }

  // Logs an error for each average of a value whose rows lag behind, if
  // something else than a step has replaced the value.
  void WarnIfReplaced(const Variables& variables, int value,
                      const std::vector<LazyAverage>& averages) const;

  // Adds the operands of these stages for value `i`.
  void AddOperands(Variables* variables, int shadows, int values, int i,
                   std::vector<void*>* operands) const;

  // The averages of value `i`, whose rows may lag behind. `rates` and `logs`
  // are those of a step. They are empty if there is no step. `shadows`,
  // `values` and `log_decays` are the first positions of the lists.
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
