// Weighted sums of arrays in double, rounded once: how checkpoints are merged.
// Knows nothing of TensorFlow.
#ifndef WRAPOPT_CC_KERNELS_MERGE_H_
#define WRAPOPT_CC_KERNELS_MERGE_H_

#include <cstddef>
#include <vector>

#include "cc/kernels/isa.h"
#include "cc/kernels/number.h"

namespace wrapopt {

// The sums of elements [begin, end) of `inputs`, each times its weight, added
// in their order. Where `is_first` is false they are added to `sums`; else what
// `sums` holds does not matter. `sums` may be nullptr where `is_first`.
// `output`, if it is not nullptr, gets the sums rounded to nearest even, once.
// Unlike the loops of the engine these do not flush subnormal numbers: the
// numbers are those of float64 arithmetic.
struct Merge {
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

#endif  // WRAPOPT_CC_KERNELS_MERGE_H_
