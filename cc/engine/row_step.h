// The step of a rule for a variable with a sparse gradient. Does not depend on
// TensorFlow.
#ifndef WRAPOPT_CC_ENGINE_ROW_STEP_H_
#define WRAPOPT_CC_ENGINE_ROW_STEP_H_

#include <cstdint>
#include <vector>

#include "cc/engine/elementwise.h"
#include "cc/engine/isa.h"
#include "cc/engine/lazy_average.h"
#include "cc/engine/number.h"
#include "cc/engine/sparse_rows.h"
#include "cc/engine/threads.h"
#include "cc/rules/rules.h"

namespace wrapopt {

class RowStep {
 public:
  RowStep() = default;
  // `states` and `grads` are the storage types.
  RowStep(const RuleInfo& rule, Number states, Number grads, Isa isa);

  // Sums the gradients of each row, and takes the step with the sum while it is
  // in the first-level cache. `grads` are in the order of the input.
  void Run(const Threads& threads, const std::vector<void*>& states,
           int64_t rows, int64_t elements, const void* grads,
           const SparseRows& sorted, const double* scalars,
           const std::vector<LazyAverage>& averages) const;

 private:
  const RuleInfo* rule_ = nullptr;
  size_t bytes_ = 0, grad_bytes_ = 0;  // Bytes of an element.
  RuleStep step_;
  SumFn sum_ = nullptr;
  RuleStep sum_step_;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_ENGINE_ROW_STEP_H_
