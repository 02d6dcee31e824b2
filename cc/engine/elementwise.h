// The CPU engine: every rule, for every number type and instruction set, over
// the arrays of many variables. Does not depend on TensorFlow.
#ifndef WRAPOPT_CC_ENGINE_ELEMENTWISE_H_
#define WRAPOPT_CC_ENGINE_ELEMENTWISE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/engine/isa.h"
#include "cc/engine/number.h"
#include "cc/rules/rules.h"

namespace wrapopt {

// The elements that the loop below prefetches: the next Pass::kBlock elements
// of arrays of `elements` elements. The processor's own prefetchers suffice for
// one or two arrays and fast arithmetic. With four arrays, a root and a
// division (Adam), memory would idle for a fifth of the time.
struct Ahead {
  size_t elements = 0;
  // False if the cache already has them.
  bool inputs = true;
  bool states = true;
};

// A rule's loop over the elements [begin, end) of its arrays, which must not
// overlap. `operands` are the states and then the inputs. It flushes subnormal
// numbers, see subnormals.h, in every thread.
using StepFn = void (*)(void* const* operands, const double* scalars,
                        size_t begin, size_t end, const Ahead& ahead);

// The loop of a rule for types of states and inputs; nullptr for a pair that no
// op has. The two types are equal, or one is float and the other half or
// bfloat16.
struct RuleStep {
  RuleId rule;
  Number state;
  Number input;
  StepFn loop = nullptr;

  operator StepFn() const { return loop; }
};

RuleStep FindStep(RuleId rule, Number states, Number inputs, Isa isa);

// A gradient of one row of a variable: row number `position` of the gradients.
struct RowGrad {
  int64_t row;
  int64_t position;
};

// Sums elements [begin, end) of `count` gradients of one row, in their order,
// from zero: sums[e - begin] is the sum of grads[position * row_elements + e].
// It flushes subnormal numbers, like a StepFn.
using SumFn = void (*)(void* sums, const void* grads, size_t row_elements,
                       const RowGrad* rows, size_t count, size_t begin,
                       size_t end);

// The function for a type of gradients. Sums of double are double, others
// float.
SumFn FindSum(Number grads, Isa isa);

// Moves `count` rows of an average towards its value, by the rule Ema. `rows`
// are all different. If it is nullptr, the function moves the first rows.
//
// In a step, the rate is `*rate`. If `rate` is nullptr, the rows catch up: see
// cc/rules/catch_up.h, where `now` is all_steps. Then log_decays[r] becomes
// `mark`.
//
// It flushes subnormal numbers, like a StepFn.
using MoveRowsFn = void (*)(void* shadows, const void* values,
                            const double* rate, double* log_decays, double now,
                            double mark, size_t row_elements,
                            const int64_t* rows, size_t count);

// nullptr for a pair for which FindStep returns nullptr.
MoveRowsFn FindMoveRows(Number shadows, Number values, Isa isa);

// Prefetches some rows of an array, of `bytes` bytes each, that will be written
// soon. The processor's prefetchers continue with what is beyond their first
// lines.
//
// A prefetch waits until the page of its address is found. So the first lines
// of all rows come first: their pages are searched for at the same time.
inline void PrefetchRows(const void* array, size_t bytes, const int64_t* rows,
                         size_t count) {
  constexpr size_t kLine = 64, kMost = 16 * kLine;
  const char* const begin = static_cast<const char*>(array);
  for (size_t r = 0; r < count; ++r) {
    __builtin_prefetch(begin + rows[r] * bytes, /*rw=*/1);
  }
  for (size_t r = 0; r < count; ++r) {
    for (size_t at = kLine; at < (bytes < kMost ? bytes : kMost); at += kLine) {
      __builtin_prefetch(begin + rows[r] * bytes + at, /*rw=*/1);
    }
  }
  asm volatile("");  // g++ removes calls of a function that only prefetches.
}

// The work of an op on each of its variables: a list of stages. A stage applies
// a rule to some of the variable's arrays.
//
// The variables are divided into blocks that fit into the first-level cache.
// All stages of a block run before the next block begins. So an array that
// several stages use, such as the value of K averages, is read from memory
// once.
//
// Stages may pass numbers on in a scratch array that stays in the cache: it
// holds one block, and each thread has its own.
class Pass {
 public:
  // 2 KiB of float. All arrays of a block, and the prefetched ones of the next,
  // stay in the cache. Blocks of four times the size take 10 % longer with many
  // arrays. Blocks of half the size are not faster.
  static constexpr size_t kBlock = 512;

  struct Stage {
    RuleStep step;
    const double* scalars;
    int operands;
    size_t bytes;  // The memory traffic of one element.
    bool new_inputs;  // False if an earlier stage has read them.
    int scratch = -1;  // The index of the scratch array among its operands.

    // Whether the stage changes nothing: cc/rules/ema.h with a rate of 0. Then
    // a pass does not run it, and neither reads nor writes its arrays.
    bool is_idle() const { return step.rule == RuleId::kEma && *scalars == 0; }
  };

  // `scratch` is the type of the scratch array.
  explicit Pass(Number scratch = Number::kFloat)
      : scratch_bytes_(SizeOf(scratch)) {}

  void AddStage(const Stage& stage);

  // `operands` are those of the first stage, then of the second, and so on;
  // nullptr for the scratch array.
  void AddVariable(size_t elements, const std::vector<void*>& operands);

  // The number of blocks of all variables.
  size_t blocks() const {
    return variables_.empty() ? 0 : variables_.back().end;
  }

  // The memory traffic of the whole pass, in bytes.
  double bytes() const;

  // Whether no stage changes anything.
  bool is_idle() const;

  // For a back end with other loops.
  const std::vector<Stage>& stages() const { return stages_; }
  size_t variables() const { return variables_.size(); }
  size_t elements(size_t variable) const {
    return variables_[variable].elements;
  }
  void* const* operands(size_t variable) const {
    return operands_.data() + variable * operands_per_variable_;
  }

  // Runs the blocks [begin, end). Calls for disjoint ranges may be concurrent.
  void Run(size_t begin, size_t end) const;

 private:
  struct Variable {
    size_t elements;
    size_t end;  // One past its last block.
  };

  const size_t scratch_bytes_;  // Bytes of a scratch element.
  std::vector<int> scratches_;  // Its indices among a variable's operands.
  int operands_per_variable_ = 0;
  std::vector<Stage> stages_;
  std::vector<Variable> variables_;
  std::vector<void*> operands_;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_ENGINE_ELEMENTWISE_H_
