// The functions that rules may use besides + - * /, for float and double. A
// back end with another number type defines functions of the same names for it,
// such as those for XLA in cc/xla/elementwise.cc.
#ifndef WRAPOPT_CC_RULES_MATHS_H_
#define WRAPOPT_CC_RULES_MATHS_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cc/rules/rule.h"

namespace wrapopt {

template <class To, class From>
WRAPOPT_RULE To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// A literal, of the number type of `like`.
WRAPOPT_RULE float ScalarLike(float like, double x) {
  static_cast<void>(like);
  return static_cast<float>(x);
}
WRAPOPT_RULE double ScalarLike(double like, double x) {
  static_cast<void>(like);
  return x;
}

WRAPOPT_RULE float Sqrt(float x) { return std::sqrt(x); }
WRAPOPT_RULE double Sqrt(double x) { return std::sqrt(x); }

template <class V>
WRAPOPT_RULE V Square(const V& x) {
  return x * x;
}

WRAPOPT_RULE bool Eq(float a, float b) { return a == b; }
WRAPOPT_RULE bool Eq(double a, double b) { return a == b; }

WRAPOPT_RULE bool Gt(float a, float b) { return a > b; }
WRAPOPT_RULE bool Gt(double a, double b) { return a > b; }

WRAPOPT_RULE float Select(bool which, float yes, float no) {
  return which ? yes : no;
}
WRAPOPT_RULE double Select(bool which, double yes, double no) {
  return which ? yes : no;
}

WRAPOPT_RULE float Max(float a, float b) { return a > b ? a : b; }
WRAPOPT_RULE double Max(double a, double b) { return a > b ? a : b; }

// If x is this or less, 1 - exp(x) is 1 in double.
constexpr double kLeastExponent = -40;

// 1 - exp(x) for x <= 0, to about a unit in the last place. It does not call
// the library's functions: no compiler makes vector code of them, and a GPU has
// others. So the CPU and the GPU give the same bits.
WRAPOPT_RULE double OneMinusExp(double x) {
  x = Max(x, kLeastExponent);
  // x = n log(2) + r, and exp(x) - 1 = 2^n (exp(r) - 1) + (2^n - 1).
  constexpr double kLog2High = 0x1.62e42fee00000p-1;
  constexpr double kLog2Low = 0x1.a39ef35793c76p-33;
  // Added to a small number, it leaves that number's integer in the last bits.
  constexpr double kToInteger = 0x1.8p52;
  const double shifted = x * 0x1.71547652b82fep0 + kToInteger;
  const double n = shifted - kToInteger;
  const double r = (x - n * kLog2High) - n * kLog2Low;
  // exp(r) = 1 + r + r^2 (1 / 2! + r / 3! + ... + r^11 / 13!)
  constexpr double kTerms[] = {1. / 6227020800, 1. / 479001600, 1. / 39916800,
                               1. / 3628800,    1. / 362880,    1. / 40320,
                               1. / 5040,       1. / 720,       1. / 120,
                               1. / 24,         1. / 6,         1. / 2};
  double sum = 0;
#if defined(__CUDACC__)
#pragma unroll
#else
#pragma GCC unroll 12
#endif
  for (int i = 0; i < 12; ++i) sum = sum * r + kTerms[i];
  const double power =
      BitCast<double>((BitCast<uint64_t>(shifted) + 1023) << 52);
  return (1 - power) - power * (r + r * r * sum);
}

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_MATHS_H_
