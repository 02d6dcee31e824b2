// The GPU kernels: every rule, in float and in double, over the arrays of many
// variables, and the averages of its result.
//
// NVRTC compiles this for each GPU, once for each Kind in cc/gpu/images.h: with
// small tables, with large ones (WRAPOPT_LARGE), and for programs of XLA
// (WRAPOPT_PROGRAM). For another compiler, define these four macros, and
// threadIdx, blockIdx and gridDim, before the include.
#include <cstddef>
#include <cstdint>
#include <utility>

#include "cc/engine/number.h"
#include "cc/gpu/table.h"
#include "cc/rules/catch_up.h"
#include "cc/rules/rules.h"

#if !defined(WRAPOPT_KERNEL)
#define WRAPOPT_KERNEL(...)                                            \
  extern "C" __global__ void __launch_bounds__(wrapopt::gpu::kThreads) \
      __VA_ARGS__
#define WRAPOPT_DEVICE __device__ __forceinline__
#define WRAPOPT_BARRIER() __syncthreads()
#if __CUDA_ARCH__ >= 700
#define WRAPOPT_TABLE(type) __grid_constant__ const type
#else
#define WRAPOPT_TABLE(type) const type
#endif
#endif

#if defined(WRAPOPT_PROGRAM)
#define WRAPOPT_KERNEL_NAME(name, type) wrapopt_program_##name##_##type
#elif defined(WRAPOPT_LARGE)
#define WRAPOPT_KERNEL_NAME(name, type) wrapopt_large_##name##_##type
#else
#define WRAPOPT_KERNEL_NAME(name, type) wrapopt_small_##name##_##type
#endif

// Uses the macros of the above.
#include "cc/gpu/access.h"

namespace wrapopt {
namespace gpu {
namespace {

#if defined(WRAPOPT_LARGE) || defined(WRAPOPT_PROGRAM)
using TheTable = LargeTable;
using TheSumTable = LargeSumTable;
using TheMarkTable = LargeMarkTable;
#else
using TheTable = SmallTable;
using TheSumTable = SmallSumTable;
using TheMarkTable = SmallMarkTable;
#endif

// Whether programs of XLA launch these kernels. Known to the compiler: a bit in
// the table would cost the kernels of the other kinds registers.
constexpr bool IsProgram() {
#if defined(WRAPOPT_PROGRAM)
  return true;
#else
  return false;
#endif
}

// Reads a scalar, weight or rate.
template <class Compute>
WRAPOPT_DEVICE void ReadNumber(Word word, Compute* x) {
  if constexpr (IsProgram()) {
    *x = static_cast<Compute>(*reinterpret_cast<const double*>(word));
  } else {
    Read(word, x);
  }
}

// The value that a rule's step leaves in state 0.
template <class Rule, RuleId kRule>
struct StepOf {
  static constexpr size_t kStates = CountNames(Info(kRule).states);
  static constexpr size_t kScalars = CountNames(Info(kRule).scalars);
  static constexpr size_t kGrad = kStates;
  static constexpr size_t kArrays = kGrad + 1;
  // If a step changes all rows, no target is lazy.
  static constexpr bool kMayBeLazy = MayUpdateRows(kRule) && !IsProgram();
  static constexpr bool kIsStep = true;

  // How array 0 is stored, which has the value of before the step.
  WRAPOPT_DEVICE static Number ValueNumber(const Header& header, const Word*) {
    return static_cast<Number>(header.state);
  }

  template <class Compute, class Access>
  WRAPOPT_DEVICE static void Run(const Header& header, const Word* words,
                                 const Arrays& arrays, const Access& access,
                                 Compute (&value)[Access::kCount]) {
    Run(header, words, arrays, access, value,
        std::make_index_sequence<kStates>(),
        std::make_index_sequence<kScalars>());
  }

  template <class Compute, class Access, size_t... s, size_t... c>
  WRAPOPT_DEVICE static void Run(const Header& header, const Word* words,
                                 const Arrays& arrays, const Access& access,
                                 Compute (&value)[Access::kCount],
                                 std::index_sequence<s...>,
                                 std::index_sequence<c...>) {
    const Number state = static_cast<Number>(header.state);
    const Number input = static_cast<Number>(header.input);
    // Start all loads before waiting for the first.
    typename Access::Raw raw[kGrad + 1];
    (access.Load(arrays.Find<Compute>(s, state), state, &raw[s]), ...);
    LoadInput(access, arrays.FindInput<Compute>(kGrad, input), input,
              &raw[kGrad]);
    Compute k[kScalars];
    (ReadNumber(words[c], &k[c]), ...);
    Compute x[kGrad + 1][Access::kCount];
    (Access::Unpack(raw[s], state, x[s]), ...);
    Access::Unpack(raw[kGrad], input, x[kGrad]);
#pragma unroll
    for (int j = 0; j < Access::kCount; ++j) {
      Rule::Step(x[s][j]..., x[kGrad][j], k[c]...);
    }
    (Access::Pack(x[s], state, &raw[s]), ...);
    (access.Store(arrays.Find<Compute>(s, state), state, raw[s]), ...);
    // The average is of the stored, rounded value.
    Access::Unpack(raw[0], state, value);
  }
};

// The weighted sum of the sources.
struct SumOfSources {
  static constexpr size_t kArrays = 0;
  static constexpr size_t kScalars = 0;
  static constexpr bool kMayBeLazy = !IsProgram();
  static constexpr bool kIsStep = true;

  WRAPOPT_DEVICE static Number ValueNumber(const Header&, const Word* words) {
    return static_cast<Number>(words[1]);
  }

  template <class Compute, class Access>
  WRAPOPT_DEVICE static void Run(const Header& header, const Word* words,
                                 const Arrays& arrays, const Access& access,
                                 Compute (&value)[Access::kCount]) {
#pragma unroll
    for (int j = 0; j < Access::kCount; ++j) value[j] = 0;
    for (int source = 0; source < header.sources; ++source) {
      const Word* operand = words + source * kWordsPerOperand;
      const Number number = static_cast<Number>(operand[1]);
      typename Access::Raw raw;
      access.Load(arrays.Find<Compute>(source, number), number, &raw);
      Compute weight, x[Access::kCount];
      ReadNumber(operand[0], &weight);
      Access::Unpack(raw, number, x);
      const Compute is_first = source == 0 ? 1 : 0;
#pragma unroll
      for (int j = 0; j < Access::kCount; ++j) {
        WeightedSum::Step(value[j], x[j], weight, is_first);
      }
    }
  }
};

// No step: lazy targets make up for those that were.
struct NoStep : SumOfSources {
  static constexpr bool kIsStep = false;
};

// Lazy targets catch up with the steps that a row has missed.
template <class Compute, class Access>
WRAPOPT_DEVICE void CatchUpTargets(const char* value_array,
                                   Number value_number, const Word* operands,
                                   int targets, const Arrays& arrays,
                                   const Access& access) {
  const Arrays log_decays = arrays.From(targets);
  const Arrays now = log_decays.From(targets);
  const uint32_t row_elements = now.offsets[targets];
  // A launch takes no more elements of a variable.
  static_assert(uint64_t{kMaxChunks} << kMaxChunkLog2 <= uint64_t{1} << 32);
  const uint32_t begin = static_cast<uint32_t>(access.begin);
  const uint32_t row = row_elements == 0 ? 0 : begin / row_elements;
#pragma unroll 1
  for (int target = 0; target < targets; ++target) {
    const auto read = [target](const Arrays& doubles, uint64_t i) {
      return reinterpret_cast<const double*>(
          doubles.Find<double>(target, Number::kDouble))[i];
    };
    const double rate = CatchUp::Rate(
        CatchUp::Lag(read(now, 0), read(log_decays, row)));
    if (rate == 0) continue;
    const Number number =
        static_cast<Number>(operands[target * kWordsPerOperand + 1]);
    char* const array = arrays.Find<Compute>(target, number);
    typename Access::Raw raw, raw_value;
    access.Load(array, number, &raw);
    access.Load(value_array, value_number, &raw_value);
    Compute x[Access::kCount], value[Access::kCount];
    Access::Unpack(raw, number, x);
    Access::Unpack(raw_value, value_number, value);
#pragma unroll
    for (int j = 0; j < Access::kCount; ++j) {
      Ema::Step(x[j], value[j], static_cast<Compute>(rate));
    }
    Access::Pack(x, number, &raw);
    access.Store(array, number, raw);
  }
}

// A variable's averages, each of which `value` moves towards itself.
template <class Compute, class Access>
class Targets {
 public:
  WRAPOPT_DEVICE Targets(int count, const Word* operands, const Arrays& arrays,
                         const Access& access)
      : count_(count), operands_(operands), arrays_(arrays), access_(access) {
    Fetch(0);
  }

  WRAPOPT_DEVICE void Move(const Compute (&value)[Access::kCount]) {
    for (int target = 0; target < count_; ++target) {
      const Number number = NumberOf(target);
      Compute rate, x[Access::kCount];
      ReadNumber(operands_[target * kWordsPerOperand], &rate);
      Access::Unpack(fetched_, number, x);
      Fetch(target + 1);
#pragma unroll
      for (int j = 0; j < Access::kCount; ++j) {
        Ema::Step(x[j], value[j], rate);
      }
      typename Access::Raw raw;
      Access::Pack(x, number, &raw);
      access_.Store(arrays_.Find<Compute>(target, number), number, raw);
    }
  }

 private:
  // Starts the load early; nothing waits for it yet.
  WRAPOPT_DEVICE void Fetch(int target) {
    if (target >= count_) return;
    const Number number = NumberOf(target);
    access_.Load(arrays_.Find<Compute>(target, number), number, &fetched_);
  }

  WRAPOPT_DEVICE Number NumberOf(int target) const {
    return static_cast<Number>(operands_[target * kWordsPerOperand + 1]);
  }

  const int count_;
  const Word* const operands_;
  const Arrays arrays_;
  const Access access_;
  typename Access::Raw fetched_;
};

template <class Value, class Compute, class Access>
WRAPOPT_DEVICE void Update(const TheTable& table, const Arrays& arrays,
                           const Access& access) {
  const Header& header = table.header;
  const Word* const operands =
      table.words + Value::kScalars + header.sources * kWordsPerOperand;
  const Arrays of_targets = arrays.From(Value::kArrays + header.sources);
  // A step's lazy targets are taken one by one: so they cost the others no
  // register.
  if constexpr (Value::kMayBeLazy && (!Value::kIsStep || Access::kCount == 1)) {
    if (header.is_lazy) {
      const Number number = Value::ValueNumber(header, table.words);
      CatchUpTargets<Compute>(arrays.Find<Compute>(0, number), number, operands,
                              header.targets, of_targets, access);
    }
  }
  if constexpr (Value::kIsStep) {
    Targets<Compute, Access> targets(header.targets, operands, of_targets,
                                     access);
    Compute value[Access::kCount];
    Value::Run(header, table.words, arrays, access, value);
    targets.Move(value);
  }
}

template <class Value, class Compute>
WRAPOPT_DEVICE void Run(const TheTable& table) {
  const Header& header = table.header;
  const bool is_lazy = Value::kMayBeLazy && header.is_lazy;
  const size_t count =
      Value::kArrays + header.sources + header.targets * (is_lazy ? 3 : 1);
  const Word* const after_numbers =
      table.words + Value::kScalars +
      (header.sources + header.targets) * kWordsPerOperand;
  if constexpr (IsProgram()) {
    const bool accept = *reinterpret_cast<const bool*>(*after_numbers);
    if (!accept) return;
  }
  const Word* const bases = after_numbers + IsProgram();
  const uint32_t* const variables =
      reinterpret_cast<const uint32_t*>(bases + count);
  const size_t stride = 1 + count + is_lazy;
  // The last variable whose first chunk is not after this one.
  const uint32_t chunk = blockIdx.x;
  uint32_t low = 0, high = header.variables;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (FirstChunk(variables[middle * stride]) <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const uint32_t* const variable = variables + low * stride;
  const uint32_t place = variable[0];
  const Arrays arrays = {bases, variable + 1};
  const uint32_t next = low + 1 < header.variables
                            ? FirstChunk(variable[stride])
                            : header.chunks;
  const uint64_t first = uint64_t{chunk - FirstChunk(place)}
                         << header.chunk_log2;
  const uint32_t elements = chunk + 1 == next
                                ? LastElements(place)
                                : uint32_t{1} << header.chunk_log2;

  constexpr uint32_t kAtATime = kThreads * kLanes<Compute>;
  const uint32_t whole =
      IsAligned(place) ? elements / kLanes<Compute> * kLanes<Compute> : 0;
  for (uint32_t begin = 0; begin < whole; begin += kAtATime) {
    const bool is_dense = header.is_dense || whole - begin < kAtATime;
    const uint32_t i = begin + threadIdx.x * (is_dense ? kLanes<Compute>
                                                       : kRun<Compute>);
    if (i >= whole) break;
    const uint32_t gap = (is_dense ? 1 : kThreads) * kRun<Compute>;
    Update<Value, Compute>(table, arrays, Lanes<Compute>{first + i, gap});
  }
#pragma unroll 1
  for (uint32_t i = whole + threadIdx.x; i < elements; i += kThreads) {
    Update<Value, Compute>(table, arrays, Single<Compute>{first + i});
  }
}

template <class Compute>
WRAPOPT_DEVICE void SumRun(const TheSumTable& table) {
  const SumHeader& header = table.header;
  const Number number = static_cast<Number>(header.number);
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
      using Access = Single<Compute>;
      typename Access::Raw raw;
      Compute x[1];
      Access{grads[g] * header.elements + i}.Load(
          reinterpret_cast<const char*>(header.grads), number, &raw);
      Access::Unpack(raw, number, x);
      sum += x[0];
    }
    sums[i] = sum;
  }
}

WRAPOPT_DEVICE void MarkRows(const TheMarkTable& table) {
  const Word* const target = table.words + blockIdx.x * kWordsPerMark;
  const Word* const rows = table.words + table.header.targets * kWordsPerMark;
  double* const log_decays = reinterpret_cast<double*>(target[0]);
  double* const all_steps = log_decays + target[1];
  const double now = *all_steps + BitCast<double>(target[2]);
  const uint32_t end = EndMarked(target[3]);
  for (uint32_t i = FirstMarked(target[3]) + threadIdx.x; i < end;
       i += kThreads) {
    log_decays[rows[i]] = now;
  }
  WRAPOPT_BARRIER();  // All threads have read what the last one writes.
  if (!IsLastMarked(target[3])) return;
  const bool rebases = CatchUp::MustRebase(now);
  for (uint64_t row = threadIdx.x; rebases && row < target[1];
       row += kThreads) {
    log_decays[row] = CatchUp::Rebased(now, log_decays[row]);
  }
  if (threadIdx.x == kThreads - 1) {
    *all_steps = rebases ? CatchUp::kRebased : now;
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
  using StepOf##rule = StepOf<rule, RuleId::k##rule>;               \
  }                                                                 \
  }                                                                 \
  WRAPOPT_KERNELS_OF(rule, wrapopt::gpu::StepOf##rule)
WRAPOPT_UPDATES(WRAPOPT_RULE_KERNELS)

WRAPOPT_KERNELS_OF(Average, wrapopt::gpu::SumOfSources)

// No program launches the others.
#if !defined(WRAPOPT_PROGRAM)
WRAPOPT_KERNELS_OF(CatchUp, wrapopt::gpu::NoStep)

WRAPOPT_KERNEL(WRAPOPT_KERNEL_NAME(Sum, float)(
    WRAPOPT_TABLE(wrapopt::gpu::TheSumTable) table)) {
  wrapopt::gpu::SumRun<float>(table);
}
WRAPOPT_KERNEL(WRAPOPT_KERNEL_NAME(Sum, double)(
    WRAPOPT_TABLE(wrapopt::gpu::TheSumTable) table)) {
  wrapopt::gpu::SumRun<double>(table);
}

WRAPOPT_KERNEL(WRAPOPT_KERNEL_NAME(Mark, double)(
    WRAPOPT_TABLE(wrapopt::gpu::TheMarkTable) table)) {
  wrapopt::gpu::MarkRows(table);
}
#endif
