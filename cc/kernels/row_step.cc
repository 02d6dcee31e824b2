#include "cc/kernels/row_step.h"

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
  const StepFn step = sorted.repeat() ? sum_step_.loop : step_.loop;

  // Takes the step for elements [begin, end) of the variable.
  auto apply = [&](const void* grad, int64_t begin, int64_t end) {
    void* operands[kMaxStates + 1];
    for (size_t s = 0; s < states.size(); ++s) {
      operands[s] = static_cast<char*>(states[s]) + begin * bytes_;
    }
    operands[states.size()] = const_cast<void*>(grad);
    step(operands, scalars, 0, end - begin, Ahead());
  };
  // Takes the step for elements [begin, end) of the row that begins at `j`.
  auto apply_row = [&](int64_t j, int64_t begin, int64_t end) {
    const int64_t index = sorted[j].row;
    const int64_t first = index * row;
    alignas(64) double sums[kBlock];
    for (int64_t next; begin < end; begin = next) {
      next = std::min(begin + kBlock, end);
      for (const LazyAverage& average : averages) {
        average.CatchUp(index, begin, next);
      }
      if (sorted.repeat()) {
        sum_(sums, grads, row, &sorted[j], sorted.EndOfRow(j) - j, begin,
             next);
        apply(sums, first + begin, first + next);
      } else {
        apply(static_cast<const char*>(grads) +
                  (sorted[j].position * row + begin) * grad_bytes_,
              first + begin, first + next);
      }
      for (const LazyAverage& average : averages) {
        average.Step(index, begin, next);
      }
    }
  };

  // Rows lie anywhere in memory, each in a page of its own.
  auto prefetch = [&](int64_t j) {
    const int64_t index = sorted[j].row;
    PrefetchRow(static_cast<const char*>(grads) +
                    sorted[j].position * row * grad_bytes_,
                row * grad_bytes_);
    if (!sorted.BeginsRow(j)) return;
    for (void* const state : states) {
      PrefetchRow(static_cast<char*>(state) + index * row * bytes_,
                  row * bytes_);
    }
    for (const LazyAverage& average : averages) average.Prefetch(index);
  };

  if (rule_->sparse == Sparse::kRows) {
    // Each gradient has a unit of work for each part of its row. The units of a
    // row's first gradient do the work. A row whose averages may lag behind is
    // one part, because it is marked as up to date when it is done.
    const int64_t part = averages.empty() ? kBlock : row;
    const int64_t parts = (row + part - 1) / part;
    for (const LazyAverage& average : averages) average.BeginStep();
    const int64_t cycles_per_unit =
        40 + std::min(row, part) *
                 (grad_bytes_ + bytes_ * (states.size() + averages.size())) / 4;
    RunParallel(threads, sorted.size() * parts, cycles_per_unit,
                [&](int64_t begin, int64_t end) {
                  int64_t j = begin / parts, at = begin % parts;
                  for (; begin < end; ++begin) {
                    if (at == 0 && j + kRowsAhead < sorted.size()) {
                      prefetch(j + kRowsAhead);
                    }
                    if (sorted.BeginsRow(j)) {
                      apply_row(j, at * part,
                                std::min((at + 1) * part, row));
                      for (const LazyAverage& average : averages) {
                        average.Mark(sorted[j].row);
                      }
                    }
                    if (++at == parts) at = 0, ++j;
                  }
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
            apply(kZeros, begin, next);
          }
          if (begin == end) break;
          const int64_t next = std::min(first + row, end);
          apply_row(j, begin - first, next - first);
          begin = next;
          j = sorted.EndOfRow(j);
        }
      });
}

}  // namespace wrapopt
