#include "cc/engine/lazy_average.h"

#include "cc/rules/catch_up.h"

namespace wrapopt {

void LazyAverage::EndStep() const {
  all_steps() += log_decay;
  step_value() = Address();
  if (!CatchUp::MustRebase(all_steps())) return;
  for (int64_t r = 0; r < rows; ++r) {
    log_decays[r] = CatchUp::Rebased(all_steps(), log_decays[r]);
  }
  all_steps() = CatchUp::kRebased;
}

void LazyAverage::CatchUpAll(const Threads& threads) const {
  if (all_steps() == 0) return;
  const int64_t bytes = 2 * sizeof(double) +
                        row_elements * (2 * shadow_bytes + value_bytes);
  RunParallel(threads, rows, bytes / 8, [&](int64_t begin, int64_t end) {
    move(Shadow(begin), Value(begin), /*rate=*/nullptr, log_decays + begin,
         all_steps(), /*mark=*/0, row_elements, /*rows=*/nullptr, end - begin);
  });
  all_steps() = step_value() = 0;
}

void LazyAverage::MoveRows(const Threads& threads, const SparseRows& sorted,
                           bool is_step) const {
  const int64_t bytes = row_elements * (3 * shadow_bytes + value_bytes);
  RunParallel(threads, sorted.size(), 40 + bytes / 4,
              [&](int64_t begin, int64_t end) {
                ForGroups(
                    sorted, begin, end,
                    [&](const RowGroup& group) { Prefetch(group); },
                    [&](const RowGroup& group) {
                      CatchUp(group);
                      if (is_step) Step(group);
                    });
              });
  if (is_step) EndStep();
}

}  // namespace wrapopt
