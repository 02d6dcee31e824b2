// Weighted sums of arrays in double, rounded once, for merging checkpoints.
// Does not depend on TensorFlow.
#ifndef WRAPOPT_CC_ENGINE_CHECKPOINT_SUMS_H_
#define WRAPOPT_CC_ENGINE_CHECKPOINT_SUMS_H_

#include <cstddef>
#include <vector>

#include "cc/engine/isa.h"
#include "cc/engine/number.h"

namespace wrapopt {

// Weighted sums of elements [begin, end) of `inputs`, added in the order of the
// inputs. If `is_first`, they overwrite `sums`, which may be nullptr; else they
// are added to it. `output`, if not nullptr, gets the sums rounded to nearest
// even, once. Unlike the engine's loops, this does not flush subnormal numbers:
// the numbers are those of float64 arithmetic.
struct CheckpointSums {
  struct Input {
    const void* data;
    Number number;
    double weight;
  };

  std::vector<Input> inputs;
  bool is_first;
  double* sums;
  void* output;
  Number output_number;

  void Run(size_t begin, size_t end, Isa isa) const;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_ENGINE_CHECKPOINT_SUMS_H_
