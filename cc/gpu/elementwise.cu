// The kernels: every rule, in float and in double, over the arrays of many
// variables, and the averages of its result.
//
// NVRTC compiles this for each GPU, once with small and once with large tables
// (WRAPOPT_LARGE). g++ compiles it for the tests' fake GPU.
#include <cstddef>
#include <cstdint>
#include <utility>

#include "cc/gpu/table.h"
#include "cc/kernels/number.h"
#include "cc/rules/rules.h"

#if defined(__CUDACC__)
#define WRAPOPT_KERNEL(...) \
  extern "C" __global__ void __launch_bounds__(wrapopt::gpu::kThreads) \
      __VA_ARGS__
#define WRAPOPT_DEVICE __device__ __forceinline__
#if __CUDA_ARCH__ >= 700
#define WRAPOPT_TABLE(type) __grid_constant__ const type
#else
#define WRAPOPT_TABLE(type) const type
#endif
#else
#include "tests/fake_gpu/emulation.h"
#endif

#if defined(WRAPOPT_LARGE)
#define WRAPOPT_KERNEL_NAME(name, type) wrapopt_large_##name##_##type
#else
#define WRAPOPT_KERNEL_NAME(name, type) wrapopt_small_##name##_##type
#endif

namespace wrapopt {
namespace gpu {
namespace {

#if defined(WRAPOPT_LARGE)
using TheTable = LargeTable;
using TheSumTable = LargeSumTable;
#else
using TheTable = SmallTable;
using TheSumTable = SmallSumTable;
#endif

struct alignas(16) Quad {
  uint32_t x, y, z, w;
};

// A thread's share of an array, as it is stored: two quads for the type that is
// computed in, one for half and bfloat16.
struct Raw {
  uint32_t words[kLaneBytes / 4];
};

// Where a thread's share of a variable lies.
struct Share {
  uint64_t begin;  // In elements of the variable.
  int lanes;       // How many there are: fewer than kLanes in the last.
};

template <class Compute>
WRAPOPT_DEVICE bool IsWhole(const Share& share, const char* p) {
  // A slice of a tensor may begin anywhere.
  return share.lanes == kLanes<Compute> &&
         reinterpret_cast<uintptr_t>(p) % sizeof(Quad) == 0;
}

template <class Compute>
WRAPOPT_DEVICE void Load(const void* array, Number number, const Share& share,
                         Raw* raw) {
#pragma unroll
  for (int i = 0; i < kLaneBytes / 4; ++i) raw->words[i] = 0;
  if (array == nullptr) return;  // An array of zeros.
  const size_t size = SizeOf(number);
  const char* p = static_cast<const char*>(array) + share.begin * size;
  if (IsWhole<Compute>(share, p)) {
    const Quad a = reinterpret_cast<const Quad*>(p)[0];
    raw->words[0] = a.x;
    raw->words[1] = a.y;
    raw->words[2] = a.z;
    raw->words[3] = a.w;
    if (size == sizeof(Compute)) {
      const Quad b = reinterpret_cast<const Quad*>(p)[1];
      raw->words[4] = b.x;
      raw->words[5] = b.y;
      raw->words[6] = b.z;
      raw->words[7] = b.w;
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kLanes<Compute>; ++j) {
    if (j >= share.lanes) break;
    if constexpr (sizeof(Compute) == 8) {
      const uint64_t x = reinterpret_cast<const uint64_t*>(p)[j];
      raw->words[2 * j] = static_cast<uint32_t>(x);
      raw->words[2 * j + 1] = static_cast<uint32_t>(x >> 32);
    } else if (size == 4) {
      raw->words[j] = reinterpret_cast<const uint32_t*>(p)[j];
    } else {
      raw->words[j / 2] |= uint32_t{reinterpret_cast<const uint16_t*>(p)[j]}
                           << (j % 2 * 16);
    }
  }
}

template <class Compute>
WRAPOPT_DEVICE void Store(void* array, Number number, const Share& share,
                          const Raw& raw) {
  const size_t size = SizeOf(number);
  char* p = static_cast<char*>(array) + share.begin * size;
  if (IsWhole<Compute>(share, p)) {
    reinterpret_cast<Quad*>(p)[0] = {raw.words[0], raw.words[1], raw.words[2],
                                     raw.words[3]};
    if (size == sizeof(Compute)) {
      reinterpret_cast<Quad*>(p)[1] = {raw.words[4], raw.words[5],
                                       raw.words[6], raw.words[7]};
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kLanes<Compute>; ++j) {
    if (j >= share.lanes) break;
    if constexpr (sizeof(Compute) == 8) {
      reinterpret_cast<uint64_t*>(p)[j] =
          uint64_t{raw.words[2 * j + 1]} << 32 | raw.words[2 * j];
    } else if (size == 4) {
      reinterpret_cast<uint32_t*>(p)[j] = raw.words[j];
    } else {
      reinterpret_cast<uint16_t*>(p)[j] =
          static_cast<uint16_t>(raw.words[j / 2] >> (j % 2 * 16));
    }
  }
}

WRAPOPT_DEVICE uint16_t HalfWord(const Raw& raw, int j) {
  return static_cast<uint16_t>(raw.words[j / 2] >> (j % 2 * 16));
}

WRAPOPT_DEVICE void Unpack(const Raw& raw, Number, double (&x)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    x[j] = BitCast<double>(uint64_t{raw.words[2 * j + 1]} << 32 |
                           raw.words[2 * j]);
  }
}

WRAPOPT_DEVICE void Unpack(const Raw& raw, Number number, float (&x)[8]) {
  if (number == Number::kFloat) {
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = BitCast<float>(raw.words[j]);
  } else if (number == Number::kHalf) {
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = wrapopt::Load(Half{HalfWord(raw, j)});
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      x[j] = wrapopt::Load(Bfloat16{HalfWord(raw, j)});
    }
  }
}

WRAPOPT_DEVICE void Pack(const double (&x)[4], Number, Raw* raw) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint64_t bits = BitCast<uint64_t>(x[j]);
    raw->words[2 * j] = static_cast<uint32_t>(bits);
    raw->words[2 * j + 1] = static_cast<uint32_t>(bits >> 32);
  }
}

template <class Storage>
WRAPOPT_DEVICE void PackHalves(const float (&x)[8], Raw* raw) {
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    Storage low, high;
    wrapopt::Store(low, x[j]);
    wrapopt::Store(high, x[j + 1]);
    raw->words[j / 2] = uint32_t{high.bits} << 16 | low.bits;
  }
}

WRAPOPT_DEVICE void Pack(const float (&x)[8], Number number, Raw* raw) {
  if (number == Number::kFloat) {
#pragma unroll
    for (int j = 0; j < 8; ++j) raw->words[j] = BitCast<uint32_t>(x[j]);
  } else if (number == Number::kHalf) {
    PackHalves<Half>(x, raw);
  } else {
    PackHalves<Bfloat16>(x, raw);
  }
}

WRAPOPT_DEVICE void Read(Word word, float* x) {
  *x = BitCast<float>(static_cast<uint32_t>(word));
}
WRAPOPT_DEVICE void Read(Word word, double* x) { *x = BitCast<double>(word); }

// The value that a rule's step leaves in state 0.
template <class Rule, size_t kStates, size_t kInputs, size_t kScalars>
struct StepOf {
  static constexpr size_t kArrays = kStates + kInputs;
  static constexpr size_t kFirstMember = kScalars;

  template <class Compute>
  WRAPOPT_DEVICE static void Run(const Header& header, const Word* words,
                                 const Word* arrays, const Share& share,
                                 Compute (&value)[kLanes<Compute>]) {
    Run(header, words, arrays, share, value,
        std::make_index_sequence<kStates>(),
        std::make_index_sequence<kInputs>(),
        std::make_index_sequence<kScalars>());
  }

  template <class Compute, size_t... s, size_t... i, size_t... c>
  WRAPOPT_DEVICE static void Run(const Header& header, const Word* words,
                                 const Word* arrays, const Share& share,
                                 Compute (&value)[kLanes<Compute>],
                                 std::index_sequence<s...>,
                                 std::index_sequence<i...>,
                                 std::index_sequence<c...>) {
    const Number state = static_cast<Number>(header.state);
    const Number input = static_cast<Number>(header.input);
    // All are on their way before the first is waited for.
    Raw raw[kArrays];
    (Load<Compute>(reinterpret_cast<const void*>(arrays[s]), state, share,
                   &raw[s]),
     ...);
    (Load<Compute>(reinterpret_cast<const void*>(arrays[kStates + i]), input,
                   share, &raw[kStates + i]),
     ...);
    Compute k[kScalars + 1];
    (Read(words[c], &k[c]), ...);
    Compute x[kArrays][kLanes<Compute>];
    (Unpack(raw[s], state, x[s]), ...);
    (Unpack(raw[kStates + i], input, x[kStates + i]), ...);
#pragma unroll
    for (int j = 0; j < kLanes<Compute>; ++j) {
      Rule::Step(x[s][j]..., x[kStates + i][j]..., k[c]...);
    }
    (Pack(x[s], state, &raw[s]), ...);
    (Store<Compute>(reinterpret_cast<void*>(arrays[s]), state, share, raw[s]),
     ...);
    // What is averaged is what was stored.
    Unpack(raw[0], state, value);
  }
};

// The weighted sum of the sources.
struct SumOfSources {
  static constexpr size_t kArrays = 0;
  static constexpr size_t kFirstMember = 0;

  template <class Compute>
  WRAPOPT_DEVICE static void Run(const Header& header, const Word* words,
                                 const Word* arrays, const Share& share,
                                 Compute (&value)[kLanes<Compute>]) {
#pragma unroll
    for (int j = 0; j < kLanes<Compute>; ++j) value[j] = 0;
    for (int source = 0; source < header.sources; ++source) {
      const Word* member = words + source * kWordsPerMember;
      const Number number = static_cast<Number>(member[1]);
      Raw raw;
      Load<Compute>(reinterpret_cast<const void*>(arrays[source]), number,
                    share, &raw);
      Compute weight, x[kLanes<Compute>];
      Read(member[0], &weight);
      Unpack(raw, number, x);
      const Compute is_first = source == 0 ? 1 : 0;
#pragma unroll
      for (int j = 0; j < kLanes<Compute>; ++j) {
        WeightedSum::Step(value[j], x[j], weight, is_first);
      }
    }
  }
};

// `value` moves each target towards itself.
template <class Compute>
WRAPOPT_DEVICE void Average(int targets, const Word* members,
                            const Word* arrays, const Share& share,
                            const Compute (&value)[kLanes<Compute>]) {
  for (int target = 0; target < targets; ++target) {
    const Word* member = members + target * kWordsPerMember;
    const Number number = static_cast<Number>(member[1]);
    void* const array = reinterpret_cast<void*>(arrays[target]);
    Raw raw;
    Load<Compute>(array, number, share, &raw);
    Compute rate, x[kLanes<Compute>];
    Read(member[0], &rate);
    Unpack(raw, number, x);
#pragma unroll
    for (int j = 0; j < kLanes<Compute>; ++j) Ema::Step(x[j], value[j], rate);
    Pack(x, number, &raw);
    Store<Compute>(array, number, share, raw);
  }
}

template <class Value, class Compute>
WRAPOPT_DEVICE void Run(const TheTable& table) {
  const Header& header = table.header;
  const Word* const members = table.words + Value::kFirstMember;
  const Word* const variables =
      members + (header.sources + header.targets) * kWordsPerMember;
  const size_t stride =
      1 + Value::kArrays + header.sources + header.targets;
  // The last variable whose first chunk is not after this one.
  const uint32_t chunk = blockIdx.x;
  uint32_t low = 0, high = header.variables;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (static_cast<uint32_t>(variables[middle * stride]) <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const Word place = variables[low * stride];
  const uint32_t next = low + 1 < header.variables
                            ? static_cast<uint32_t>(
                                  variables[(low + 1) * stride])
                            : header.chunks;
  const Word* const arrays = variables + low * stride + 1;
  const uint64_t first = uint64_t{chunk - static_cast<uint32_t>(place)}
                         << header.chunk_log2;
  const uint32_t elements = chunk + 1 == next
                                ? static_cast<uint32_t>(place >> 32)
                                : uint32_t{1} << header.chunk_log2;
  for (uint32_t i = threadIdx.x * kLanes<Compute>; i < elements;
       i += kThreads * kLanes<Compute>) {
    const int left = static_cast<int>(elements - i);
    const Share share = {first + i,
                         left < kLanes<Compute> ? left : kLanes<Compute>};
    Compute value[kLanes<Compute>];
    Value::Run(header, table.words, arrays, share, value);
    Average(header.targets, members + header.sources * kWordsPerMember,
            arrays + Value::kArrays + header.sources, share, value);
  }
}

template <class Compute>
WRAPOPT_DEVICE Compute LoadOne(const void* array, Number number, uint64_t i) {
  switch (number) {
    case Number::kHalf:
      return wrapopt::Load(static_cast<const Half*>(array)[i]);
    case Number::kBfloat16:
      return wrapopt::Load(static_cast<const Bfloat16*>(array)[i]);
    case Number::kFloat:
      return static_cast<const float*>(array)[i];
    default:
      return static_cast<Compute>(static_cast<const double*>(array)[i]);
  }
}

template <class Compute>
WRAPOPT_DEVICE void SumRun(const TheSumTable& table) {
  const SumHeader& header = table.header;
  const uint32_t run = blockIdx.x;
  const Word* const runs = table.words;
  const Word* const grads = runs + 2 * header.runs;
  const Word begin = run == 0 ? 0 : runs[2 * (run - 1) + 1];
  const Word end = runs[2 * run + 1];
  Compute* const sums =
      reinterpret_cast<Compute*>(header.sums) + runs[2 * run] * header.elements;
  for (uint64_t i = blockIdx.y * kThreads + threadIdx.x; i < header.elements;
       i += uint64_t{gridDim.y} * kThreads) {
    Compute sum = sums[i];
    for (Word g = begin; g < end; ++g) {
      sum += LoadOne<Compute>(reinterpret_cast<const void*>(header.grads),
                              static_cast<Number>(header.number),
                              grads[g] * header.elements + i);
    }
    sums[i] = sum;
  }
}

}  // namespace
}  // namespace gpu
}  // namespace wrapopt

#define WRAPOPT_KERNELS_OF(name, value)                                \
  WRAPOPT_KERNEL(WRAPOPT_KERNEL_NAME(name, float)(                     \
      WRAPOPT_TABLE(wrapopt::gpu::TheTable) table)) {                   \
    wrapopt::gpu::Run<value, float>(table);                            \
  }                                                                    \
  WRAPOPT_KERNEL(WRAPOPT_KERNEL_NAME(name, double)(                    \
      WRAPOPT_TABLE(wrapopt::gpu::TheTable) table)) {                   \
    wrapopt::gpu::Run<value, double>(table);                           \
  }

#define WRAPOPT_RULE_KERNELS(rule, states, inputs, scalars, sparse) \
  namespace wrapopt {                                               \
  namespace gpu {                                                   \
  using StepOf##rule =                                              \
      StepOf<rule, CountNames(states), CountNames(inputs),          \
             CountNames(scalars)>;                                  \
  }                                                                 \
  }                                                                 \
  WRAPOPT_KERNELS_OF(rule, wrapopt::gpu::StepOf##rule)
WRAPOPT_RULES(WRAPOPT_RULE_KERNELS)

WRAPOPT_KERNELS_OF(Average, wrapopt::gpu::SumOfSources)

WRAPOPT_KERNEL(WRAPOPT_KERNEL_NAME(Sum, float)(
    WRAPOPT_TABLE(wrapopt::gpu::TheSumTable) table)) {
  wrapopt::gpu::SumRun<float>(table);
}
WRAPOPT_KERNEL(WRAPOPT_KERNEL_NAME(Sum, double)(
    WRAPOPT_TABLE(wrapopt::gpu::TheSumTable) table)) {
  wrapopt::gpu::SumRun<double>(table);
}
