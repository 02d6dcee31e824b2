// The step with a sparse gradient, and averages whose rows may lag behind.
#include "cc/engine/row_step.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cc/engine/elementwise.h"
#include "cc/engine/lazy_average.h"
#include "cc/engine/sparse_rows.h"
#include "cc/rules/catch_up.h"
#include "tests/cc/arrays.h"
#include "tests/cc/pool.h"
#include "tests/cc/reference.h"

namespace wrapopt {
namespace {

// A variable with its slots.
struct Variable {
  Variable(const RuleInfo& rule, Number number, int64_t rows, int64_t row,
           Random* random)
      : rule(rule), number(number), rows(rows), row(row) {
    for (size_t s = 0; s < CountNames(rule.states); ++s) {
      states.push_back(Numbers(rows * row, number, random, s));
    }
  }

  // The step of row `r` with a gradient of `row` numbers.
  void StepRow(int64_t r, Number grad_number, void* grad,
               const double* scalars) const {
    std::vector<void*> operands;
    for (const Array& state : states) {
      operands.push_back(state.as<char>() + r * row * SizeOf(number));
    }
    operands.push_back(grad);
    Reference(rule.id, number, grad_number, operands.data(), scalars, row);
  }

  std::vector<void*> data() const {
    std::vector<void*> pointers;
    for (const Array& state : states) pointers.push_back(state.data());
    return pointers;
  }

  const RuleInfo& rule;
  const Number number;
  const int64_t rows, row;
  std::vector<Array> states;
};

void Compare(const Threads& threads, const RuleInfo& rule, Number number,
             Number grad_number, int64_t rows, int64_t row, int64_t count,
             Random* random) {
  const Variable got(rule, number, rows, row, random);
  const Variable want = got;
  const std::vector<double> scalars = ScalarsOf(rule, row % 2);
  const Array grads = Numbers(count * row, grad_number, random, 1);
  std::vector<int64_t> indices(count);
  for (int64_t& index : indices) index = Below(rows, random);
  SparseRows sorted;
  ASSERT_EQ(sorted.Sort(threads, indices.data(), count, rows), nullptr);

  RowStep(rule, number, grad_number, SupportedIsas().back())
      .Run(threads, got.data(), rows, rows * row, grads.data(), sorted,
           scalars.data(), {});

  const bool is_double = number == Number::kDouble;
  const Number sum_number = is_double ? Number::kDouble : Number::kFloat;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t j = sorted.Find(r);
    const bool touched = j < count && sorted[j].row == r;
    if (!touched && rule.sparse == Sparse::kRows) continue;
    const Array sum(row * SizeOf(sum_number));
    for (int64_t e = 0; e < row; ++e) {
      double total = 0;
      for (int64_t i = j; touched && i < sorted.EndOfRow(j); ++i) {
        total += Get(grads, grad_number, sorted[i].position * row + e);
        if (!is_double) total = static_cast<float>(total);
      }
      Set(sum, sum_number, e, total);
    }
    if (touched && sorted.EndOfRow(j) == j + 1) {
      // A copy, which may end where the gradients do not.
      const Array grad(row * SizeOf(grad_number));
      std::memcpy(grad.data(),
                  grads.as<char>() + sorted[j].position * grad.bytes(),
                  grad.bytes());
      want.StepRow(r, grad_number, grad.data(), scalars.data());
    } else {
      want.StepRow(r, sum_number, sum.data(), scalars.data());
    }
  }
  for (size_t s = 0; s < got.states.size(); ++s) {
    ExpectSame(got.states[s], want.states[s], number,
               std::string(rule.name) + " state " + std::to_string(s) +
                   " of " + std::to_string(rows) + " rows of " +
                   std::to_string(row) + ", " + std::to_string(count) +
                   " gradients");
  }
}

TEST(RowStep, GivesTheBitsOfTheRule) {
  Random random(11);
  const Pool none(0), pool(3);
  for (const RuleInfo& rule : kRules) {
    if (rule.inputs != "grad") continue;
    for (const auto& [number, grad_number] : kPairs) {
      for (const int64_t row : {1, 3, 16, 512, 600}) {
        for (const int64_t count : {0, 1, 12}) {
          Compare(none, rule, number, grad_number, /*rows=*/9, row, count,
                  &random);
        }
      }
    }
    Compare(pool, rule, Number::kFloat, Number::kFloat, 700, 33, 900, &random);
    Compare(pool, rule, Number::kHalf, Number::kFloat, 3, 20000, 4, &random);
  }
}

TEST(RowStep, OfRowsWithoutElements) {
  Random random(12);
  for (const auto& [rows, row] : {std::pair{4, 0}, {1, 0}}) {
    Compare(Pool(2), kRules[0], Number::kFloat, Number::kFloat, rows, row, 3,
            &random);
  }
  // A variable without rows.
  RowStep(kRules[0], Number::kFloat, Number::kFloat, Isa::kBaseline)
      .Run(Pool(2), {nullptr, nullptr, nullptr}, 0, 0, nullptr, SparseRows(),
           nullptr, {});
}

// Gradient descent with averages whose rows lag behind, next to averages of
// which each step moves all rows. The first differ from the others by the
// roundings of their steps: of the average itself, whose numbers are below 4,
// to 2^-24 of it in each, and as much of rate * (value - average).
void RunLazy(const Threads& threads, int64_t rows, int64_t row, int64_t count,
             int steps, double decay, Random* random) {
  const RuleInfo& rule = Info(RuleId::kGradientDescent);
  const Number number = Number::kFloat;
  const Isa isa = SupportedIsas().back();
  const Variable var(rule, number, rows, row, random);
  const Array shadow = Numbers(rows * row, number, random, 3);
  const Array log_decays((rows + 2) * sizeof(double), sizeof(double));
  std::memset(log_decays.data(), 0, log_decays.bytes());
  std::vector<double> dense;
  for (int64_t e = 0; e < rows * row; ++e) {
    dense.push_back(Get(shadow, number, e));
  }
  const LazyAverage average = {FindMoveRows(number, number, isa),
                               shadow.as<char>(),
                               var.states[0].as<char>(),
                               4,
                               4,
                               rows,
                               row,
                               log_decays.as<double>(),
                               1 - decay,
                               std::max(std::log(decay), CatchUp::kLeastLag)};
  const RowStep step(rule, number, number, isa);
  const double lr = 0.01;
  for (int s = 0; s < steps; ++s) {
    const Array grads = Numbers(count * row, number, random);
    std::vector<int32_t> indices(count);
    for (int32_t& index : indices) index = Below(rows, random);
    SparseRows sorted;
    ASSERT_EQ(sorted.Sort(threads, indices.data(), count, rows), nullptr);
    step.Run(threads, var.data(), rows, rows * row, grads.data(), sorted, &lr,
             {average});
    for (int64_t e = 0; e < rows * row; ++e) {
      dense[e] += (1 - decay) * (Get(var.states[0], number, e) - dense[e]);
    }
    EXPECT_FALSE(average.IsValueReplaced());
    if (s % 3 == 0) {  // Some are read in between.
      LazyAverage read = average;
      read.rate = read.log_decay = 0;
      read.MoveRows(threads, sorted, /*is_step=*/false);
      read.value = nullptr;
      EXPECT_TRUE(read.IsValueReplaced());
    }
  }
  average.CatchUpAll(threads);
  EXPECT_EQ(average.all_steps(), 0);
  for (int64_t e = 0; e < rows * row; ++e) {
    ASSERT_NEAR(Get(shadow, number, e), dense[e],
                (steps + 1) * 2 * 4 * 0x1p-24)
        << e << " of " << rows * row;
  }
}

TEST(LazyAverage, IsThatOfAllSteps) {
  Random random(13);
  const Pool none(0), pool(3);
  for (const int64_t row : {1, 3, 16, 520}) {
    for (const int64_t rows : {1, 7, 40}) {
      RunLazy(none, rows, row, /*count=*/5, /*steps=*/20, 0.9, &random);
      RunLazy(none, rows, row, /*count=*/0, /*steps=*/2, 0.9, &random);
    }
  }
  RunLazy(pool, 4000, 64, /*count=*/900, /*steps=*/10, 0.99, &random);
  // The sums over all steps are rebased after 250 steps.
  RunLazy(none, 30, 4, /*count=*/3, /*steps=*/600, 0, &random);
  RunLazy(pool, 30, 4, /*count=*/3, /*steps=*/600, 1e-17, &random);
}

TEST(LazyAverage, MovesRowsInItsOwnStep) {
  Random random(14);
  const Number number = Number::kFloat;
  const int64_t rows = 5000, row = 40;
  const Array values = Numbers(rows * row, number, &random);
  const Array shadow = Numbers(rows * row, number, &random);
  const Array want = shadow;
  const Array log_decays((rows + 2) * sizeof(double));
  std::memset(log_decays.data(), 0, log_decays.bytes());
  const double rate = 0.25;
  const LazyAverage average = {
      FindMoveRows(number, number, SupportedIsas().back()), shadow.as<char>(),
      values.as<char>(), 4, 4, rows, row, log_decays.as<double>(), rate,
      std::log(1 - rate)};
  std::vector<int32_t> indices(3000);
  for (int32_t& index : indices) index = Below(rows, &random);
  const Pool pool(3);
  SparseRows sorted;
  ASSERT_EQ(sorted.Sort(pool, indices.data(), indices.size(), rows), nullptr);
  average.MoveRows(pool, sorted, /*is_step=*/true);
  for (int64_t j = 0; j < sorted.size(); ++j) {
    if (!sorted.BeginsRow(j)) continue;
    const int64_t at = sorted[j].row * row * 4;
    void* const operands[] = {want.as<char>() + at, values.as<char>() + at};
    Reference(RuleId::kEma, number, number, operands, &rate, row);
  }
  ExpectSame(shadow, want, number, "shadow");
}

}  // namespace
}  // namespace wrapopt
