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
//
// If the targets are lazy, a variable is some rows of a table that follow each
// other. Before the step, a target makes up for the steps that a row has missed:
// it moves towards the value of then by
//
//   1 - exp(now - log_decays[row])
//
// Further arrays of such a variable are: the log decays of each target, which
// begin at its first row, and `now` of each, one double. They are only read; when
// the step is done, a launch of another kernel writes them. Where there is a step,
// the place of such a variable says that it is not aligned.
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
  uint8_t is_dense : 1;
  uint8_t is_lazy : 1;  // Whether the targets are.
};

// The words of a table:
//
//   the scalars of the rule;
//   of each source and target: its weight or rate, and its Number;
//   of each array: its base, the lowest address of it that a variable has;
//
// and then, by 4 bytes, of each variable: its place, of each of its arrays the
// elements between the base and it, and if the targets are lazy, the elements of
// its rows, or 0 where it is one row.
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
using SmallSumTable = Table<SumHeader, kSmall>;
using LargeSumTable = Table<SumHeader, kLarge>;

// Ends a step of lazy targets. A block takes a target: in its log decays it marks
// rows that have taken the step, and if these are the last, ends it for all.
struct MarkHeader {
  uint64_t targets;
};

// Of each target: its log decays; how many rows they are of, which is where the
// sum over all steps lies; that of this step; and its Marked. Then the rows.
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
