// The storage types of numbers and their compute types: float for half and
// bfloat16, the same type for float and double.
//
// Load and Store are branch-free integer and float code without F16C and
// AVX512-BF16. So the same source vectorizes for every instruction set and
// gives the same bits on each.
#ifndef WRAPOPT_CC_ENGINE_NUMBER_H_
#define WRAPOPT_CC_ENGINE_NUMBER_H_

#include <cstddef>
#include <cstdint>

#include "cc/rules/maths.h"
#include "cc/rules/rule.h"

namespace wrapopt {

struct Half {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};

// The list of number types. `dtype` is TensorFlow's name without DT_, `name` is
// its name in the attributes of an op, and `ffi` is XLA's name. cc/README.md
// says what else a new type takes.
//
//  X(number, storage, dtype, name, ffi)
#define WRAPOPT_NUMBERS(X)                           \
  X(kHalf, Half, HALF, "half", F16)                  \
  X(kBfloat16, Bfloat16, BFLOAT16, "bfloat16", BF16) \
  X(kFloat, float, FLOAT, "float", F32)              \
  X(kDouble, double, DOUBLE, "double", F64)

enum class Number {
#define WRAPOPT_NUMBER(number, storage, dtype, name, ffi) number,
  WRAPOPT_NUMBERS(WRAPOPT_NUMBER)
#undef WRAPOPT_NUMBER
};

constexpr size_t SizeOf(Number number) {
  switch (number) {
#define WRAPOPT_SIZE(number, storage, dtype, name, ffi) \
  case Number::number:                                  \
    return sizeof(storage);
    WRAPOPT_NUMBERS(WRAPOPT_SIZE)
#undef WRAPOPT_SIZE
  }
  return 0;
}

WRAPOPT_RULE float Load(float x) { return x; }
WRAPOPT_RULE double Load(double x) { return x; }

WRAPOPT_RULE float Load(Bfloat16 x) {
  return BitCast<float>(uint32_t{x.bits} << 16);
}

#if defined(__CUDA_ARCH__)
// A GPU has an instruction for each, with equal results except for the bits of
// a NaN.
WRAPOPT_RULE float Load(Half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
WRAPOPT_RULE void Store(Half& to, float x) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
}
#else
WRAPOPT_RULE float Load(Half x) {
  const uint32_t sign = (uint32_t{x.bits} & 0x8000) << 16;
  const uint32_t magnitude = uint32_t{x.bits} & 0x7fff;
  // Exponent and mantissa at a float's positions. A product with 2^112 rebiases
  // the exponent; infinity and NaN need another correction.
  const float scaled = BitCast<float>(magnitude << 13) * 0x1p112f;
  const uint32_t special = magnitude >= 0x7c00 ? 0x7f800000u : 0u;
  // A subnormal half would be a subnormal float before that product, and a
  // thread that flushes subnormals would make it zero. So it is computed as
  // 2^-24 times an integer below 1024.
  const float tiny =
      static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  const uint32_t bits = magnitude < 0x400 ? BitCast<uint32_t>(tiny)
                                          : BitCast<uint32_t>(scaled) | special;
  return BitCast<float>(sign | bits);
}

WRAPOPT_RULE void Store(Half& to, float x) {
  const uint32_t bits = BitCast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  // Normal halves: rebias the exponent by 112, round to nearest even.
  const uint32_t normal =
      (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Below 2^-14 (subnormal halves and zero): adding 0.5, whose last mantissa
  // bit is 2^-24, rounds at the right bit.
  const uint32_t subnormal =
      BitCast<uint32_t>(BitCast<float>(magnitude) + 0.5f) -
      BitCast<uint32_t>(0.5f);
  const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
  // The nearest half is infinity for 65520 and above.
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  to.bits = static_cast<uint16_t>(
      sign | (magnitude >= 0x477ff000u ? special : finite));
}
#endif

WRAPOPT_RULE void Store(float& to, float x) { to = x; }
WRAPOPT_RULE void Store(double& to, double x) { to = x; }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
WRAPOPT_RULE void Store(Bfloat16& to, float x) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
}
#else
WRAPOPT_RULE void Store(Bfloat16& to, float x) {
  const uint32_t bits = BitCast<uint32_t>(x);
  // To nearest, ties to even.
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  // A NaN must not be rounded up to infinity.
  const uint32_t quiet = (bits & 0x80000000u) | 0x7fc00000u;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  to.bits = static_cast<uint16_t>((nan ? quiet : rounded) >> 16);
}
#endif

template <class Storage>
struct ComputeTypeOf {
  using type = float;
};
template <>
struct ComputeTypeOf<double> {
  using type = double;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_ENGINE_NUMBER_H_
