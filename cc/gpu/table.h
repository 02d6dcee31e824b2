// What a kernel launch is told, by value: which arrays, how their numbers are
// stored, and the scalars. Shared by the device code and by what launches it.
//
// A table that is a kernel's argument needs no device memory, no copy and
// nothing whose life must be managed, and a CUDA graph may capture it. Its size
// is what the driver allows: 4 KiB on every GPU; 32764 bytes from compute
// capability 7.0 and CUDA 12.1 on. So an array is 4 bytes of it, an offset from
// the first of its kind.
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

// A thread's share of an array at a time: 32 bytes of the type that is computed
// in, in two runs of 16 bytes.
constexpr int kShareBytes = 32;
template <class Compute>
constexpr int kLanes = kShareBytes / sizeof(Compute);
template <class Compute>
constexpr int kRun = kLanes<Compute> / 2;

// A block takes one chunk of 2^k elements of one variable.
constexpr int kMinChunkLog2 = 11;
constexpr int kMaxChunkLog2 = 15;
constexpr uint32_t kMaxChunks = 1 << 16;  // Of a launch.

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
  // Whether a thread's two runs lie side by side, so that half and bfloat16 are
  // read by 16 bytes. Otherwise a warp's first runs do, and its second runs:
  // each of its accesses is 512 bytes without gaps.
  uint8_t is_dense;
};

// The words of a table:
//
//   the scalars of the rule;
//   of each source and target: its weight or rate, and its Number;
//   of each array: its base, the lowest address of it that a variable has;
//
// and then, by 4 bytes, of each variable: its place, and of each of its arrays
// the elements between the base and it.
template <size_t kBytes>
struct Table {
  static constexpr size_t kWords = (kBytes - sizeof(Header)) / sizeof(Word);
  Header header;
  Word words[kWords];
};

using SmallTable = Table<4096>;
using LargeTable = Table<32760>;  // The most that words of 8 bytes fill.

constexpr size_t kWordsPerMember = 2;  // Of a source or a target.

// Of an input of zeros.
constexpr uint32_t kNoArray = 0xffffffff;

// Where a variable is: its first chunk, how many elements its last one has, and
// whether all of its arrays begin where 16 bytes do.
constexpr uint32_t Place(uint32_t first_chunk, uint32_t last_elements,
                         bool is_aligned) {
  return first_chunk | (last_elements - 1) << 16 | uint32_t{is_aligned} << 31;
}
constexpr uint32_t FirstChunk(uint32_t place) { return place & 0xffff; }
constexpr uint32_t LastElements(uint32_t place) {
  return (place >> 16 & 0x7fff) + 1;
}
constexpr bool IsAligned(uint32_t place) { return place >> 31; }
static_assert(kMaxChunkLog2 <= 15 && kMaxChunks <= 1 << 16,
              "they have 15 and 16 bits of a place");

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
