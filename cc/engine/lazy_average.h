// An average of a variable whose rows may lag behind. Does not depend on
// TensorFlow.
#ifndef WRAPOPT_CC_ENGINE_LAZY_AVERAGE_H_
#define WRAPOPT_CC_ENGINE_LAZY_AVERAGE_H_

#include <cstddef>
#include <cstdint>

#include "cc/engine/elementwise.h"
#include "cc/engine/sparse_rows.h"
#include "cc/engine/threads.h"

namespace wrapopt {

// One average of a variable. A step moves only the rows that it touches. Other
// rows lag behind until a step touches them or the average is read.
//
// log_decays[r] is the log_decay of row r in cc/rules/catch_up.h. Element
// [rows] is all_steps. Element [rows + 1] is the address of the value's buffer
// in the last step, or 0 if it is not known.
struct LazyAverage {
  MoveRowsFn move;
  char* shadow;
  const char* value;
  size_t shadow_bytes, value_bytes;  // Of an element.
  int64_t rows, row_elements;
  double* log_decays;
  double rate, log_decay;  // Of this step.

  // False if the runtime may move the value's buffer after any step.
  bool keeps_buffers = true;

  double& all_steps() const { return log_decays[rows]; }
  double& step_value() const { return log_decays[rows + 1]; }

  // Whether something else than a step has replaced the value while rows lag
  // behind. The old value, towards which they had to move, is lost.
  bool IsValueReplaced() const {
    return all_steps() != 0 && step_value() != 0 && step_value() != Address();
  }

  // Brings rows up to date, except for this step, and marks them as if they had
  // taken this step. The value must still be that of the steps before.
  void CatchUp(const RowGroup& group) const {
    move(shadow, value, /*rate=*/nullptr, log_decays, all_steps(),
         /*mark=*/all_steps() + log_decay, row_elements, group.rows,
         group.count);
  }

  // Takes this step, for rows that have caught up.
  void Step(const RowGroup& group) const {
    move(shadow, value, &rate, nullptr, 0, 0, row_elements, group.rows,
         group.count);
  }

  // Prefetches rows that will catch up soon.
  void Prefetch(const RowGroup& group) const {
    PrefetchRows(log_decays, sizeof(double), group.rows, group.count);
    PrefetchRows(shadow, row_elements * shadow_bytes, group.rows, group.count);
  }

  // Ends the step, after all of its rows have taken it.
  void EndStep() const;

  // Brings all rows up to date.
  void CatchUpAll(const Threads& threads) const;
  // Brings some rows up to date, and takes this step with them if there is one.
  void MoveRows(const Threads& threads, const SparseRows& sorted,
                bool is_step) const;

  // A double holds every address of a process.
  double Address() const {
    return keeps_buffers
               ? static_cast<double>(reinterpret_cast<uintptr_t>(value))
               : 0;
  }

  char* Shadow(int64_t row) const {
    return shadow + row * row_elements * shadow_bytes;
  }
  const char* Value(int64_t row) const {
    return value + row * row_elements * value_bytes;
  }
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_ENGINE_LAZY_AVERAGE_H_
