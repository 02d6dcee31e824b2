#include "cc/engine/elementwise.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cc/engine/isa_dispatch.h"
#include "cc/engine/subnormals.h"
#include "cc/rules/catch_up.h"

namespace wrapopt {
namespace {

constexpr size_t kLine = 64;   // Bytes of a cache line.
constexpr size_t kGroup = 64;  // Elements between two prefetches.

template <class Rule, class State, class Input, size_t... s, size_t... i,
          size_t... c>
WRAPOPT_RULE void RunRule(void* const* operands, const double* scalars,
                       size_t begin, size_t end, const Ahead& ahead,
                       std::index_sequence<s...>, std::index_sequence<i...>,
                       std::index_sequence<c...>) {
  using Compute = typename ComputeTypeOf<State>::type;
  // With one unused element, because C++ has no arrays of no elements.
  State* const states[] = {static_cast<State*>(operands[s])..., nullptr};
  const Input* const inputs[] = {
      static_cast<const Input*>(operands[sizeof...(s) + i])..., nullptr};
  const Compute k[] = {static_cast<Compute>(scalars[c])..., Compute{}};
  for (size_t from = begin; from < end; from += kGroup) {
    const size_t to = std::min(from + kGroup, end);
    if (const size_t next = from + Pass::kBlock; next < ahead.elements) {
      // Into the second-level cache: the first is full of this block. Not in a
      // function, because g++ removes calls of a function that only prefetches.
      for (size_t j = ahead.states ? 0 : kGroup; j < kGroup;
           j += kLine / sizeof(State)) {
        (__builtin_prefetch(states[s] + next + j, /*rw=*/0, /*locality=*/2),
         ...);
      }
      for (size_t j = ahead.inputs ? 0 : kGroup; j < kGroup;
           j += kLine / sizeof(Input)) {
        (__builtin_prefetch(inputs[i] + next + j, /*rw=*/0, /*locality=*/2),
         ...);
      }
    }
#pragma GCC ivdep
    for (size_t j = from; j < to; ++j) {
      Compute x[] = {static_cast<Compute>(Load(states[s][j]))...};
      Rule::Step(x[s]..., static_cast<Compute>(Load(inputs[i][j]))..., k[c]...);
      (Store(states[s][j], x[s]), ...);
    }
  }
  static_cast<void>(inputs);
  static_cast<void>(k);
}

// A rule, and the numbers of its states, inputs and scalars.
template <class R, size_t kStates, size_t kInputs, size_t kScalars>
struct Arity {
  template <class State, class Input>
  struct Loop {
    using Fn = StepFn;
    // float and double are bound by memory, half and bfloat16 by arithmetic.
    static constexpr bool kIsWide = sizeof(State) == 2;

    WRAPOPT_RULE static void Run(void* const* operands, const double* scalars,
                                 size_t begin, size_t end, const Ahead& ahead) {
      const FlushSubnormals flush;
      RunRule<R, State, Input>(operands, scalars, begin, end, ahead,
                            std::make_index_sequence<kStates>(),
                            std::make_index_sequence<kInputs>(),
                            std::make_index_sequence<kScalars>());
    }
  };
};

// Sums the gradients of a row.
template <class Sum, class Grad>
struct RowSum {
  using Fn = SumFn;
  static constexpr bool kIsWide = false;

  WRAPOPT_RULE static void Run(void* sums, const void* grads,
                               size_t row_elements, const RowGrad* rows,
                               size_t count, size_t begin, size_t end) {
    const FlushSubnormals flush;
    Sum* const __restrict to = static_cast<Sum*>(sums);
    const size_t elements = end - begin;
    std::memset(to, 0, elements * sizeof(Sum));
    const auto grad = [&](size_t i) {
      return static_cast<const Grad*>(grads) +
             rows[i].position * row_elements + begin;
    };
    constexpr size_t kAhead = 8;
    for (size_t i = 0; i < count; ++i) {
      if (i + kAhead < count) {
        for (size_t e = 0; e < elements; e += kLine / sizeof(Grad)) {
          __builtin_prefetch(grad(i + kAhead) + e);
        }
      }
      const Grad* const __restrict from = grad(i);
      for (size_t e = 0; e < elements; ++e) {
        to[e] += Load(from[e]);
      }
    }
  }
};

template <class State, class Input>
struct RowsMove {
  using Fn = MoveRowsFn;
  static constexpr bool kIsWide = sizeof(State) == 2;

  WRAPOPT_RULE static void Run(void* shadows, const void* values,
                               const double* rate, double* log_decays,
                               double now, double mark, size_t row_elements,
                               const int64_t* rows, size_t count) {
    const FlushSubnormals flush;
    using Compute = typename ComputeTypeOf<State>::type;
    // Each exponential is a chain of operations that wait for each other. So
    // vectors of them are computed at the same time, if there are so many rows.
    constexpr size_t kAtOnce = 32, kExps = 8;
    for (size_t from = 0; from < count; from += kAtOnce) {
      const size_t some = std::min(kAtOnce, count - from);
      size_t row[kAtOnce];
      alignas(kLine) double lags[kAtOnce] = {};
      alignas(kLine) double rates[kAtOnce];
      for (size_t r = 0; r < some; ++r) {
        row[r] = rows == nullptr ? from + r : rows[from + r];
        if (rate != nullptr) {
          rates[r] = *rate;
        } else {
          lags[r] =
              CatchUp::Lag(now, std::exchange(log_decays[row[r]], mark));
        }
      }
      for (size_t r = 0; rate == nullptr && r < some; r += kExps) {
        for (size_t e = r; e < r + kExps; ++e) {
          rates[e] = CatchUp::Rate(lags[e]);
        }
      }
      for (size_t r = 0; r < some; ++r) {
        if (rates[r] == 0) continue;
        State* const __restrict shadow =
            static_cast<State*>(shadows) + row[r] * row_elements;
        const Input* const __restrict value =
            static_cast<const Input*>(values) + row[r] * row_elements;
        const Compute by = static_cast<Compute>(rates[r]);
        for (size_t e = 0; e < row_elements; ++e) {
          Compute s = static_cast<Compute>(Load(shadow[e]));
          Ema::Step(s, static_cast<Compute>(Load(value[e])), by);
          Store(shadow[e], s);
        }
      }
    }
  }
};

// Whether a rule may have these types of states and inputs: equal types, or
// float with a type of 2 bytes.
template <class State, class Input>
constexpr bool kIsPair =
    std::is_same_v<State, Input> ||
    (std::is_same_v<State, float> && sizeof(Input) == 2) ||
    (std::is_same_v<Input, float> && sizeof(State) == 2);

template <template <class, class> class F, class State>
auto ForInputs(Number inputs, Isa isa) -> typename F<State, State>::Fn {
  switch (inputs) {
#define WRAPOPT_FOR_INPUT(number, storage, dtype, name, ffi)  \
  case Number::number:                                        \
    if constexpr (kIsPair<State, storage>) {                  \
      return ForIsa<F<State, storage>>(isa);                  \
    }                                                         \
    break;
    WRAPOPT_NUMBERS(WRAPOPT_FOR_INPUT)
#undef WRAPOPT_FOR_INPUT
  }
  return nullptr;
}

// The function of an F for types of states and inputs, or nullptr.
template <template <class, class> class F>
auto ForNumbers(Number states, Number inputs, Isa isa) ->
    typename F<float, float>::Fn {
  switch (states) {
#define WRAPOPT_FOR_STATE(number, storage, dtype, name, ffi) \
  case Number::number:                                       \
    return ForInputs<F, storage>(inputs, isa);
    WRAPOPT_NUMBERS(WRAPOPT_FOR_STATE)
#undef WRAPOPT_FOR_STATE
  }
  return nullptr;
}

StepFn FindLoop(RuleId rule, Number states, Number inputs, Isa isa) {
  switch (rule) {
#define WRAPOPT_FIND(name, s, i, c, sparse)                                    \
  case RuleId::k##name:                                                        \
    return ForNumbers<Arity<name, CountNames(s), CountNames(i),                \
                            CountNames(c)>::Loop>(states, inputs, isa);
    WRAPOPT_RULES(WRAPOPT_FIND)
#undef WRAPOPT_FIND
  }
  return nullptr;
}

}  // namespace

RuleStep FindStep(RuleId rule, Number states, Number inputs, Isa isa) {
  return {rule, states, inputs, FindLoop(rule, states, inputs, isa)};
}

SumFn FindSum(Number grads, Isa isa) {
  switch (grads) {
#define WRAPOPT_FOR_GRAD(number, storage, dtype, name, ffi)                 \
  case Number::number:                                                      \
    return ForIsa<RowSum<typename ComputeTypeOf<storage>::type, storage>>(isa);
    WRAPOPT_NUMBERS(WRAPOPT_FOR_GRAD)
#undef WRAPOPT_FOR_GRAD
  }
  return nullptr;
}

MoveRowsFn FindMoveRows(Number shadows, Number values, Isa isa) {
  return ForNumbers<RowsMove>(shadows, values, isa);
}

void Pass::AddStage(const Stage& stage) {
  if (stage.scratch >= 0) {
    scratches_.push_back(operands_per_variable_ + stage.scratch);
  }
  stages_.push_back(stage);
  operands_per_variable_ += stage.operands;
}

void Pass::AddVariable(size_t elements, const std::vector<void*>& operands) {
  variables_.push_back({elements, blocks() + (elements + kBlock - 1) / kBlock});
  operands_.insert(operands_.end(), operands.begin(), operands.end());
}

double Pass::bytes() const {
  double elements = 0;
  for (const Variable& variable : variables_) elements += variable.elements;
  double bytes = 0;
  for (const Stage& stage : stages_) {
    if (!stage.is_idle()) bytes += elements * stage.bytes;
  }
  return bytes;
}

bool Pass::is_idle() const {
  return std::all_of(stages_.begin(), stages_.end(),
                     [](const Stage& stage) { return stage.is_idle(); });
}

void Pass::Run(size_t begin, size_t end) const {
  alignas(kLine) std::byte scratch[kBlock * sizeof(double)] = {};
  std::vector<void*> own;  // Operands, some of them this thread's scratch.
  // The first variable with a block at or after `begin`.
  auto variable = std::upper_bound(
      variables_.begin(), variables_.end(), begin,
      [](size_t block, const Variable& v) { return block < v.end; });
  for (size_t block = begin; block < end; ++variable) {
    const size_t index = variable - variables_.begin();
    const size_t first = index == 0 ? 0 : variables_[index - 1].end;
    for (; block < std::min(end, variable->end); ++block) {
      const size_t from = (block - first) * kBlock;
      const size_t to = std::min(from + kBlock, variable->elements);
      void* const* operands =
          operands_.data() + index * operands_per_variable_;
      if (!scratches_.empty()) {
        own.assign(operands, operands + operands_per_variable_);
        // A step indexes by elements of the variable, and its element `from` is
        // the first of the scratch. The address of element 0 may be invalid, so
        // it is an integer, not a pointer.
        const uintptr_t element_0 =
            reinterpret_cast<uintptr_t>(scratch) - from * scratch_bytes_;
        for (const int operand : scratches_) {
          own[operand] = reinterpret_cast<void*>(element_0);
        }
        operands = own.data();
      }
      for (const Stage& stage : stages_) {
        if (!stage.is_idle()) {
          stage.step.loop(operands, stage.scalars, from, to,
                          {variable->elements, stage.new_inputs,
                           /*states=*/stage.scratch != 0});
        }
        operands += stage.operands;
      }
    }
  }
}

}  // namespace wrapopt
