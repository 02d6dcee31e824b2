#include "cc/engine/row_step.h"

#include <algorithm>
#include <cstddef>


namespace wrapopt {
namespace {

// The number of elements that are summed on the stack; rows are divided into
// parts of this size.
constexpr int64_t kBlock = Pass::kBlock;

constexpr size_t kMaxStates = [] {
  size_t most = 0;
  for (const RuleInfo& rule : kRules) {
    most = std::max(most, CountNames(rule.states));
  }
  return most;
}();

}  // namespace

RowStep::RowStep(const RuleInfo& rule, Number states, Number grads, Isa isa)
    : rule_(&rule), bytes_(SizeOf(states)), grad_bytes_(SizeOf(grads)) {
  step_ = FindStep(rule.id, states, grads, isa);
  // Gradients of one row are summed in the rule's compute type.
  const Number sums =
      states == Number::kDouble ? Number::kDouble : Number::kFloat;
  sum_step_ = FindStep(rule.id, states, sums, isa);
  sum_ = FindSum(grads, isa);
}

void RowStep::Run(const Threads& threads, const std::vector<void*>& states,
                  int64_t rows, int64_t elements, const void* grads,
                  const SparseRows& sorted, const double* scalars,
                  const std::vector<LazyAverage>& averages) const {
  if (elements == 0) return;
  const int64_t row = elements / rows;

  // Takes the step for elements [begin, end) of the variable.
  auto apply = [&](StepFn step, const void* grad, int64_t begin, int64_t end) {
    void* operands[kMaxStates + 1];
    for (size_t s = 0; s < states.size(); ++s) {
      operands[s] = static_cast<char*>(states[s]) + begin * bytes_;
    }
    operands[states.size()] = const_cast<void*>(grad);
    step(operands, scalars, 0, end - begin, Ahead());
  };
  // Takes the step for elements [begin, end) of one row, whose gradients are
  // [j, next_j).
  auto apply_row = [&](int64_t j, int64_t next_j, int64_t begin, int64_t end) {
    const int64_t first = sorted[j].row * row;
    if (next_j == j + 1) {
      apply(step_.loop,
            static_cast<const char*>(grads) +
                (sorted[j].position * row + begin) * grad_bytes_,
            first + begin, first + end);
      return;
    }
    alignas(64) double sums[kBlock];
    for (int64_t next; begin < end; begin = next) {
      next = std::min(begin + kBlock, end);
      sum_(sums, grads, row, &sorted[j], next_j - j, begin, next);
      apply(sum_step_.loop, sums, first + begin, first + next);
    }
  };

  // The sum of many gradients prefetches what is left out here.
  auto prefetch_grads = [&](const RowGroup& group) {
    constexpr int64_t kMost = 4 * RowGroup::kMost;
    int64_t positions[kMost];
    int64_t count = 0;
    for (int64_t j = group.begin[0];
         j < group.begin[group.count] && count < kMost; ++j) {
      positions[count++] = sorted[j].position;
    }
    PrefetchRows(grads, row * grad_bytes_, positions, count);
  };

  if (rule_->sparse == Sparse::kRows) {
    const int64_t arrays = states.size() + averages.size();
    const int64_t cycles_per_row =
        40 + row * (grad_bytes_ + bytes_ * arrays) / 4;
    // Gradients are the units of work; the first of a row does all of it.
    RunParallel(
        threads, sorted.size(), cycles_per_row,
        [&](int64_t begin, int64_t end) {
          ForGroups(
              sorted, begin, end,
              [&](const RowGroup& group) {
                prefetch_grads(group);
                for (void* const state : states) {
                  PrefetchRows(state, row * bytes_, group.rows, group.count);
                }
                for (const LazyAverage& average : averages) {
                  average.Prefetch(group);
                }
              },
              [&](const RowGroup& group) {
                for (const LazyAverage& average : averages) {
                  average.CatchUp(group);
                }
                for (int64_t k = 0; k < group.count; ++k) {
                  apply_row(group.begin[k], group.begin[k + 1], 0, row);
                }
                for (const LazyAverage& average : averages) {
                  average.Step(group);
                }
              });
        });
    for (const LazyAverage& average : averages) average.EndStep();
    return;
  }
  // Rows without a gradient have gradient zero.
  static constexpr double kZeros[kBlock] = {};
  RunParallel(
      threads, (elements + kBlock - 1) / kBlock,
      50 + kBlock * bytes_ * states.size() / 4,
      [&](int64_t block, int64_t end_block) {
        int64_t begin = block * kBlock;
        const int64_t end = std::min(end_block * kBlock, elements);
        for (int64_t j = sorted.Find(begin / row); begin < end;) {
          const int64_t first = j < sorted.size() ? sorted[j].row * row : end;
          for (int64_t next; begin < std::min(first, end); begin = next) {
            next = std::min({begin + kBlock, first, end});
            apply(step_.loop, kZeros, begin, next);
          }
          if (begin == end) break;
          const int64_t next = std::min(first + row, end);
          const int64_t next_j = sorted.EndOfRow(j);
          apply_row(j, next_j, begin - first, next - first);
          begin = next;
          j = next_j;
        }
      });
}

}  // namespace wrapopt
