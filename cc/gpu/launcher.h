// Runs the kernels of cc/gpu/elementwise.cu. Does not depend on TensorFlow: its
// arguments are a stream and device addresses.
//
// A launch does not wait, allocate or copy, so a CUDA graph can capture it. But
// the first launch of a kernel loads it, if LoadForProgram has not. The context
// of the stream must be the current one.
#ifndef WRAPOPT_CC_GPU_LAUNCHER_H_
#define WRAPOPT_CC_GPU_LAUNCHER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cc/engine/number.h"
#include "cc/gpu/driver.h"
#include "cc/rules/rules.h"

namespace wrapopt {
namespace gpu {

// One step for each of many variables: see cc/gpu/table.h.
struct Update {
  struct Operand {
    double scalar;  // The weight of a source, the rate of a target.
    Number number;
  };

  // Without a rule, the value is the weighted sum of the sources. With a rule,
  // there are no sources.
  std::optional<RuleId> rule;
  Number state = Number::kFloat;
  Number input = Number::kFloat;
  std::vector<double> scalars;
  std::vector<Operand> sources;
  std::vector<Operand> targets;
  // False: lazy targets catch up with the only source, and no step is taken.
  bool is_step = true;
  // Whether it is computed in double, or in float.
  bool is_double = false;
  // If `accept` is not 0, it is the address of a bool: the step is taken if it
  // is true when the launch runs. Then `numbers` is the address of doubles,
  // which take the place of the scalars, weights and rates, in that order. A
  // program of XLA has such updates. Their targets are not lazy.
  Address accept = 0;
  Address numbers = 0;
  // The log2 of a block's elements, 3 to 15; 0 lets the launcher choose.
  int chunk_log2 = 0;

  // The number of elements of each variable.
  std::vector<uint64_t> elements;
  // The number of arrays of a variable: states, inputs, sources, targets. The
  // address 0 of an input means zeros.
  size_t arrays = 0;
  std::vector<Address> addresses;
  // If the targets are lazy: of how many elements its rows are, at most
  // kMaxRowElements, or 0 where it is one row. Else empty.
  std::vector<uint64_t> row_elements;
};

// The most elements of a row that is only a part of a variable.
constexpr uint64_t kMaxRowElements = 1 << 16;

// Enqueues the step; no two of its arrays may overlap, but sources and targets
// may be one array. Returns an error's text, empty if there is none.
std::string Enqueue(const Update& update, Stream stream);

// Loads the kernel of such updates with an `accept` into the current context.
// Then Enqueue loads nothing.
std::string LoadForProgram(const Update& update);

// Sums the gradients of rows that have several.
struct RowSum {
  struct Run {
    uint64_t row;  // The row in `sums`.
    std::vector<uint64_t> grads;
  };

  Address grads;
  Number number;  // The storage type of the gradients.
  Address sums;   // double if `is_double`, else float.
  bool is_double;
  uint64_t elements;  // Elements of a row.
  std::vector<Run> runs;
};

// Enqueues the addition of each run's gradients to its row of `sums`, in their
// order.
std::string Enqueue(const RowSum& sum, Stream stream);

// The rows that have taken a step, of averages whose rows may lag behind.
struct RowMarks {
  struct Average {
    Address log_decays;
    uint64_t rows;     // The variable's rows. log_decays[rows] is all_steps.
    double log_decay;  // Of this step.
    size_t touched;    // Which of the lists below has its rows.
  };

  std::vector<Average> averages;
  std::vector<std::vector<uint64_t>> touched;
};

// Marks these rows, and adds the step to the sums over all steps.
std::string Enqueue(const RowMarks& marks, Stream stream);

}  // namespace gpu
}  // namespace wrapopt

#endif  // WRAPOPT_CC_GPU_LAUNCHER_H_
