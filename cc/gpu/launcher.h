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
  // Whether it is computed in double, or in float.
  bool is_double = false;
  // A block takes 2^chunk_log2 elements, 3 to 15; 0 for what seems best.
  int chunk_log2 = 0;

  // Of each variable.
  std::vector<uint64_t> elements;
  // Its arrays: states, inputs, sources, targets. An input at 0 stands for
  // zeros.
  size_t arrays = 0;
  std::vector<Address> addresses;
};

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

}  // namespace gpu
}  // namespace wrapopt

#endif  // WRAPOPT_CC_GPU_LAUNCHER_H_
