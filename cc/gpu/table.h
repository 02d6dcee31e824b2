// The argument of a kernel launch: its arrays, their storage types and the
// scalars. For the device code and the launcher.
//
// The table is passed by value. So it needs no device memory, no copy and no
// lifetime management, and a CUDA graph can capture it. The driver limits its
// size to 4 KiB, and from compute capability 7.0 and CUDA 12.1 on to 32764
// bytes. So an array takes 4 bytes: an offset from the first array of its kind.
//
// A launch takes one step for each of its variables:
//
//   value = the step of a rule (state 0 after it), or the weighted sum of the
//           variable's sources;
//   each of its targets moves towards `value` by the rule Ema.
//
// The arrays of a variable are states, inputs, sources and targets.
#ifndef WRAPOPT_CC_GPU_TABLE_H_
#define WRAPOPT_CC_GPU_TABLE_H_

#include <cstddef>
#include <cstdint>

#include "cc/engine/number.h"

namespace wrapopt {
namespace gpu {

constexpr int kThreads = 256;  // Threads of a block.

// A thread's share of an array at a time: 32 bytes of the compute type, in two
// runs of 16 bytes.
constexpr int kShareBytes = 32;
template <class Compute>
constexpr int kLanes = kShareBytes / sizeof(Compute);
template <class Compute>
constexpr int kRun = kLanes<Compute> / 2;

// A block takes one chunk of 2^k elements of one variable.
constexpr int kMinChunkLog2 = 11;
constexpr int kMaxChunkLog2 = 15;
constexpr uint32_t kMaxChunks = 1 << 16;  // Chunks of a launch.

// A word of a table is an integer, a pointer, or a number of the compute type.
using Word = uint64_t;

struct Header {
  uint32_t variables;
  uint32_t chunks;   // The number of chunks of all variables.
  uint16_t sources;  // The number per variable, like targets.
  uint16_t targets;
  uint8_t chunk_log2;
  uint8_t state;  // Number, as is the input.
  uint8_t input;
  // Whether a thread's two runs lie side by side, so that half and bfloat16 are
  // read by 16 bytes. Otherwise a warp's first runs do, and its second runs:
  // each of its accesses is 512 bytes without gaps.
  uint8_t is_dense : 1;
  uint8_t is_lazy : 1;  // Whether the targets are.
};

// The words of a table:
//
//   the scalars of the rule;
//   for each source and target: its weight or rate, and its Number;
//   for a program of XLA, the address of a bool: false leaves all as it is;
//   for each array: its base, the lowest address of the variables' arrays;
//
// Then, in 4 bytes each, for each variable: its place; for each of its arrays,
// the number of elements between the base and the array; and if the targets are
// lazy, the elements of a row, or 0 if the variable is one row.
//
// The host does not know the numbers of a program of XLA: in the place of its
// scalars, weights and rates are addresses of doubles.
template <class AnyHeader, size_t kBytes>
struct Table {
  static constexpr size_t kWords = (kBytes - sizeof(AnyHeader)) / sizeof(Word);
  AnyHeader header;
  Word words[kWords];
};

constexpr size_t kSmall = 4096;
constexpr size_t kLarge = 32760;  // The most that words of 8 bytes fill.

using SmallTable = Table<Header, kSmall>;
using LargeTable = Table<Header, kLarge>;

constexpr size_t kWordsPerOperand = 2;  // Words of a source or a target.

// The distance of an input of zeros.
constexpr uint32_t kNoArray = 0xffffffff;

// The place of a variable: its first chunk, the number of elements in its last
// chunk, and whether all of its arrays are aligned to 16 bytes.
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
// gradients of one row. It adds them to `sums[row]`, in their order.
struct SumHeader {
  uint32_t runs;
  uint32_t number;  // The storage type of the gradients.
  uint64_t grads;   // Rows of both arrays have `elements` elements.
  uint64_t sums;
  uint64_t elements;
};

// The words of a table: of each run, its row in `sums` and one past its last
// gradient; then the gradients' rows in `grads`, of all runs.
using SmallSumTable = Table<SumHeader, kSmall>;
using LargeSumTable = Table<SumHeader, kLarge>;

// Ends a step of lazy targets. A block takes a target. In its log decays, it
// marks rows that have taken the step. If they are the last rows of the step,
// it also updates the sum over all steps.
struct MarkHeader {
  uint64_t targets;
};

// For each target: its log decays; the number of their rows, which is the index
// of the sum over all steps; log(decay) of this step; and its Marked. Then the
// rows.
using SmallMarkTable = Table<MarkHeader, kSmall>;
using LargeMarkTable = Table<MarkHeader, kLarge>;

constexpr size_t kWordsPerMark = 4;

// Rows [begin, end) of a table's, and whether they are the last of a step.
constexpr Word Marked(size_t begin, size_t end, bool is_last) {
  return begin | end << 16 | Word{is_last} << 32;
}
constexpr uint32_t FirstMarked(Word marked) { return marked & 0xffff; }
constexpr uint32_t EndMarked(Word marked) { return marked >> 16 & 0xffff; }
constexpr bool IsLastMarked(Word marked) { return marked >> 32; }

}  // namespace gpu
}  // namespace wrapopt

#endif  // WRAPOPT_CC_GPU_TABLE_H_
