#include "cc/engine/checkpoint_sums.h"

#include <algorithm>
#include <cstdint>

#include "cc/engine/isa_dispatch.h"
#include "cc/rules/weighted_sum.h"

namespace wrapopt {
namespace {

// The sums of a block, 16 KiB, stay in the first-level cache. In smaller
// blocks, the runs of each input are too short for the processor's prefetchers.
constexpr size_t kBlock = 2048;

// Rounds a double to float, to odd. A second rounding to half or bfloat16 then
// has the result of rounding the double once (Boldo and Melquiond, "When double
// rounding is odd", 2005).
WRAPOPT_RULE float RoundToOdd(double x) {
  const float nearest = static_cast<float>(x);
  const double back = nearest;
  const uint32_t bits = BitCast<uint32_t>(nearest);
  const double magnitude = x < 0 ? -x : x;
  const double back_magnitude = back < 0 ? -back : back;
  const uint32_t toward_zero = bits - (back_magnitude > magnitude ? 1u : 0u);
  // False for a NaN.
  const bool is_inexact = back < x || back > x;
  return BitCast<float>(is_inexact ? toward_zero | 1u : bits);
}

WRAPOPT_RULE void StoreOnce(double& to, double x) { to = x; }
WRAPOPT_RULE void StoreOnce(float& to, double x) { to = static_cast<float>(x); }
WRAPOPT_RULE void StoreOnce(Half& to, double x) { Store(to, RoundToOdd(x)); }
WRAPOPT_RULE void StoreOnce(Bfloat16& to, double x) {
  Store(to, RoundToOdd(x));
}

using SumsFn = void (*)(void* to, const void* from, double weight,
                        double is_first, size_t elements);

template <class T>
struct Add {
  using Fn = SumsFn;
  static constexpr bool kIsWide = true;

  WRAPOPT_RULE static void Run(void* sums, const void* input, double weight,
                               double is_first, size_t elements) {
    double* const __restrict to = static_cast<double*>(sums);
    const T* const __restrict from = static_cast<const T*>(input);
    for (size_t j = 0; j < elements; ++j) {
      WeightedSum::Step(to[j], static_cast<double>(Load(from[j])), weight,
                        is_first);
    }
  }
};

template <class T>
struct Round {
  using Fn = SumsFn;
  static constexpr bool kIsWide = true;

  WRAPOPT_RULE static void Run(void* output, const void* sums, double, double,
                               size_t elements) {
    T* const __restrict to = static_cast<T*>(output);
    const double* const __restrict from = static_cast<const double*>(sums);
    for (size_t j = 0; j < elements; ++j) StoreOnce(to[j], from[j]);
  }
};

template <template <class> class F>
SumsFn ForNumber(Number number, Isa isa) {
  switch (number) {
#define WRAPOPT_FOR_NUMBER(number, storage, dtype, name, ffi) \
  case Number::number:                                        \
    return ForIsa<F<storage>>(isa);
    WRAPOPT_NUMBERS(WRAPOPT_FOR_NUMBER)
#undef WRAPOPT_FOR_NUMBER
  }
  return nullptr;
}

}  // namespace

void CheckpointSums::Run(size_t begin, size_t end, Isa isa) const {
  std::vector<SumsFn> add;
  for (const Input& input : inputs) {
    add.push_back(ForNumber<Add>(input.number, isa));
  }
  const SumsFn round = ForNumber<Round>(output_number, isa);
  alignas(64) double scratch[kBlock];
  for (size_t from = begin; from < end; from += kBlock) {
    const size_t elements = std::min(kBlock, end - from);
    double* const to = sums == nullptr ? scratch : sums + from;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Input& input = inputs[i];
      add[i](to,
             static_cast<const char*>(input.data) + from * SizeOf(input.number),
             input.weight, is_first && i == 0 ? 1.0 : 0.0, elements);
    }
    if (output != nullptr) {
      round(static_cast<char*>(output) + from * SizeOf(output_number), to, 0, 0,
            elements);
    }
  }
}

}  // namespace wrapopt
