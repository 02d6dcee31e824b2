// Runs the kernels of cc/gpu/elementwise.cu. Knows nothing of TensorFlow: a
// stream and device addresses are all that it takes.
//
// A launch neither waits nor allocates nor copies, so that a CUDA graph may
// capture it; the first launch of a kernel loads it. The stream's context must
// be the current one.
#ifndef WRAPOPT_CC_GPU_LAUNCHER_H_
#define WRAPOPT_CC_GPU_LAUNCHER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cc/gpu/driver.h"
#include "cc/kernels/number.h"
#include "cc/rules/rules.h"

namespace wrapopt {
namespace gpu {

// One step for each of many variables: see cc/gpu/table.h.
struct Update {
  struct Member {
    double scalar;  // A source's weight, a target's rate.
    Number number;
  };

  // Without one, the value is the weighted sum of the sources; with one, there
  // are no sources.
  std::optional<RuleId> rule;
  Number state = Number::kFloat;
  Number input = Number::kFloat;
  std::vector<double> scalars;
  std::vector<Member> sources;
  std::vector<Member> targets;
  // False: lazy targets catch up with the only source, and no step is taken.
  bool is_step = true;
  // Whether it is computed in double, or in float.
  bool is_double = false;
  // A block takes 2^chunk_log2 elements, 3 to 15; 0 for what seems best.
  int chunk_log2 = 0;

  // Of each variable.
  std::vector<uint64_t> elements;
  // Its arrays: states, inputs, sources, targets. An input at 0 stands for
  // zeros. If the targets are lazy, also the log decays of each target, from its
  // first row on, and their sum over all steps.
  size_t arrays = 0;
  std::vector<Address> addresses;
  // If the targets are lazy: of how many elements its rows are, at most
  // kMaxRowElements, or 0 where it is one row. Else empty.
  std::vector<uint64_t> row_elements;
};

// Of a row that is not a variable by itself.
constexpr uint64_t kMaxRowElements = 1 << 16;

// Enqueues the step; no two of its arrays may overlap, but sources and targets
// may be one array. Returns an error's text, empty if there is none.
std::string Enqueue(const Update& update, Stream stream);

// Gradients of the rows of one array of which some have several.
struct RowSum {
  struct Run {
    uint64_t row;  // In `sums`.
    std::vector<uint64_t> grads;
  };

  Address grads;
  Number number;  // How they are stored.
  Address sums;   // In double or in float, as `is_double` says.
  bool is_double;
  uint64_t elements;  // Of a row of either.
  std::vector<Run> runs;
};

// Enqueues the addition of each run's gradients to its row of `sums`, in their
// order.
std::string Enqueue(const RowSum& sum, Stream stream);

// The rows that have taken a step, of averages whose rows may lag behind.
struct RowMarks {
  struct Average {
    Address log_decays;
    uint64_t rows;     // Of the variable: log_decays[rows] is of all steps.
    double log_decay;  // Of this step.
    size_t touched;    // Which of the lists below has its rows.
  };

  std::vector<Average> averages;
  std::vector<std::vector<uint64_t>> touched;
};

// Enqueues the marks of these rows, and adds the step to the sums over all steps.
std::string Enqueue(const RowMarks& marks, Stream stream);

}  // namespace gpu
}  // namespace wrapopt

#endif  // WRAPOPT_CC_GPU_LAUNCHER_H_
