// The CPU engine: every rule, for every number type, on every instruction set,
// over the arrays of many variables. Knows nothing of TensorFlow.
#ifndef WRAPOPT_CC_KERNELS_ELEMENTWISE_CPU_H_
#define WRAPOPT_CC_KERNELS_ELEMENTWISE_CPU_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/kernels/isa.h"
#include "cc/kernels/number.h"
#include "cc/rules/rules.h"

namespace wrapopt {

// What the loop below fetches ahead of its turn: the next Pass::kBlock elements
// where the arrays hold so many, `elements` in all. The processor's own
// prefetchers do well with one or two arrays and arithmetic that is done in no
// time. With four arrays, a root and a division (Adam) they let memory idle for
// a fifth of the time.
struct Ahead {
  size_t elements = 0;
  // False for those that the cache has already.
  bool inputs = true;
  bool states = true;
};

// One rule's loop over the elements [begin, end) of its arrays, which must not
// overlap. `operands` are the states and then the inputs. It flushes subnormal
// numbers, as subnormals.h says, whatever thread runs it.
using StepFn = void (*)(void* const* operands, const double* scalars,
                        size_t begin, size_t end, const Ahead& ahead);

// A rule for states and inputs stored as given, and its loop: nullptr for a
// pair that no op has. They are of one type, or one is float and the other half
// or bfloat16.
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
// It flushes subnormal numbers, as a StepFn does.
using SumFn = void (*)(void* sums, const void* grads, size_t row_elements,
                       const RowGrad* rows, size_t count, size_t begin,
                       size_t end);

// For gradients stored as given. Sums are float, those of double are double.
SumFn FindSum(Number grads, Isa isa);

// Brings rows of an average up to date that no step has touched for a while.
//
// In such steps the average s of a value v decayed towards a constant:
//
//   s += (1 - exp(now - log_decays[r])) (v - s)
//
// in row r, `log_decays[r]` and `now` being the sums of log(decay) over all steps
// up to the one when the row was last up to date, and up to now. The arrays
// begin at the first of the rows. It flushes subnormal numbers, as a StepFn does.
using CatchUpFn = void (*)(void* shadows, const void* values,
                           const double* log_decays, double now,
                           size_t row_elements, size_t rows);

// nullptr for a pair for which FindStep finds none.
CatchUpFn FindCatchUp(Number shadows, Number values, Isa isa);

// So many gradients before its own, a row is asked for.
constexpr int64_t kRowsAhead = 24;

// Asks for a row that a step will write soon: its first lines, after which the
// processor goes on by itself.
inline void PrefetchRow(const void* row, size_t bytes) {
  constexpr size_t kLine = 64, kMost = 16 * kLine;
  for (size_t at = 0; at < (bytes < kMost ? bytes : kMost); at += kLine) {
    __builtin_prefetch(static_cast<const char*>(row) + at, /*rw=*/1);
  }
  asm volatile("");  // g++ removes calls of a function that only prefetches.
}

// What an op does to each of its variables: a list of stages, each of them one
// rule applied to some of the variable's arrays.
//
// The variables are cut into blocks small enough for the first-level cache,
// and all stages of a block run before the next block is touched. So an array
// that several stages use, such as the value that K averages are taken of, is
// read from memory once.
//
// Stages may hand numbers on in a scratch array that never leaves that cache:
// it holds one block, and each thread has its own.
class Pass {
 public:
  // 2 KiB of float. All arrays of a block, and the next block's that are on
  // their way, stay in the cache; four times as much takes 10 % longer with many
  // arrays, half as much nowhere less.
  static constexpr size_t kBlock = 512;

  struct Stage {
    RuleStep step;
    const double* scalars;
    int operands;
    size_t bytes;  // What one element moves between memory and the core.
    bool new_inputs;  // False where a stage before has them in the cache.
    int scratch = -1;  // Which of its operands is the scratch array, if any.
  };

  // `scratch` is how the scratch array stores its numbers.
  explicit Pass(Number scratch = Number::kFloat)
      : scratch_bytes_(SizeOf(scratch)) {}

  void AddStage(const Stage& stage);

  // `operands` are those of the first stage, of the second stage, and so on,
  // nullptr for the scratch array.
  void AddVariable(size_t elements, const std::vector<void*>& operands);

  // Blocks of all variables together.
  size_t blocks() const { return variables_.empty() ? 0 : variables_.back().end; }

  // Bytes that the whole pass moves.
  double bytes() const;

  // What a back end with loops of its own reads.
  const std::vector<Stage>& stages() const { return stages_; }
  size_t variables() const { return variables_.size(); }
  size_t elements(size_t variable) const {
    return variables_[variable].elements;
  }
  void* const* operands(size_t variable) const {
    return operands_.data() + variable * operands_per_variable_;
  }

  // Runs the blocks [begin, end). Calls for distinct ranges may run at the
  // same time.
  void Run(size_t begin, size_t end) const;

 private:
  struct Variable {
    size_t elements;
    size_t end;  // One past its last block.
  };

  const size_t scratch_bytes_;  // Of an element.
  std::vector<int> scratch_operands_;  // Where a variable's operands have it.
  int operands_per_variable_ = 0;
  std::vector<Stage> stages_;
  std::vector<Variable> variables_;
  std::vector<void*> operands_;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_ELEMENTWISE_CPU_H_
