// What a kernel launch is told, by value: which arrays, how their numbers are
// stored, and the scalars. Shared by the device code and by what launches it.
//
// A table that is a kernel's argument needs no device memory, no copy and
// nothing whose life must be managed, and a CUDA graph may capture it. Its size
// is what the driver allows: 4 KiB on every GPU; 32764 bytes from compute
// capability 7.0 and CUDA 12.1 on.
//
// A launch takes one step for each of its variables:
//
//   value = the step of a rule (state 0 after it), or the weighted sum of the
//           variable's sources;
//   each of its targets moves towards `value` as Ema says.
//
// Each variable's arrays are: states, inputs, sources, targets.
#ifndef WRAPOPT_CC_GPU_TABLE_H_
#define WRAPOPT_CC_GPU_TABLE_H_

#include <cstddef>
#include <cstdint>

#include "cc/kernels/number.h"

namespace wrapopt {
namespace gpu {

constexpr int kThreads = 256;  // Of a block.

// A thread's share at a time: 32 bytes of the type that is computed in. Arrays
// of half and bfloat16 are then read by 16 bytes.
constexpr int kLaneBytes = 32;
template <class Compute>
constexpr int kLanes = kLaneBytes / sizeof(Compute);

// A block takes one chunk of 2^k elements of one variable.
constexpr int kMinChunkLog2 = 11;
constexpr int kMaxChunkLog2 = 16;

// Words of a table are read as an integer, a pointer, or a number of the type
// that is computed in.
using Word = uint64_t;

struct Header {
  uint32_t variables;
  uint32_t chunks;   // Of all variables.
  uint16_t sources;  // Per variable, as are the targets.
  uint16_t targets;
  uint8_t chunk_log2;
  uint8_t state;  // Number, as is the input.
  uint8_t input;
  uint8_t unused;
};

// The words of a table:
//
//   the scalars of the rule;
//   of each source and target: its weight or rate, and its Number;
//   of each variable: its place, and its arrays.
template <size_t kBytes>
struct Table {
  static constexpr size_t kWords = (kBytes - sizeof(Header)) / sizeof(Word);
  Header header;
  Word words[kWords];
};

using SmallTable = Table<4096>;
using LargeTable = Table<32760>;  // The most that words of 8 bytes fill.

constexpr size_t kWordsPerMember = 2;  // Of a source or a target.

// Where a variable is: its first chunk, and how many elements its last one has.
constexpr Word Place(uint32_t first_chunk, uint32_t last_elements) {
  return Word{last_elements} << 32 | first_chunk;
}

// Sums the gradients of rows that have several. A block takes a run: the
// gradients of one row, in their order, which are added to `sums[row]`.
struct SumHeader {
  uint32_t runs;
  uint32_t number;  // How the gradients are stored.
  uint64_t grads;   // Both arrays have `elements` elements in a row.
  uint64_t sums;
  uint64_t elements;
};

// The words of a table: of each run, its row in `sums` and one past its last
// gradient; then the gradients' rows in `grads`, of all runs.
template <size_t kBytes>
struct SumTable {
  static constexpr size_t kWords = (kBytes - sizeof(SumHeader)) / sizeof(Word);
  SumHeader header;
  Word words[kWords];
};

using SmallSumTable = SumTable<4096>;
using LargeSumTable = SumTable<32760>;

}  // namespace gpu
}  // namespace wrapopt

#endif  // WRAPOPT_CC_GPU_TABLE_H_
