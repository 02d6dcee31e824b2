// By how much an average decays in the steps that a row of it has missed. Not by
// the library's functions, which no compiler turns into vector code, and which
// are others on a GPU: CPU and GPU give the same bits.
#ifndef WRAPOPT_CC_KERNELS_ONE_MINUS_EXP_H_
#define WRAPOPT_CC_KERNELS_ONE_MINUS_EXP_H_

#include <cstdint>

#include "cc/kernels/number.h"
#include "cc/rules/rule.h"

namespace wrapopt {

// 1 - exp(x) for x <= 0, to about a unit in the last place; 1 from -40 on.
WRAPOPT_RULE double OneMinusExp(double x) {
  x = x > -40 ? x : -40;
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

#endif  // WRAPOPT_CC_KERNELS_ONE_MINUS_EXP_H_
