// How far the rows of an average lag behind: the sum of log(decay) over the
// steps that a row has missed.
#ifndef WRAPOPT_CC_KERNELS_LAGS_H_
#define WRAPOPT_CC_KERNELS_LAGS_H_

#include <cstdint>

#include "cc/kernels/number.h"
#include "cc/rules/rule.h"

namespace wrapopt {

// A lag of which nothing is left: 1 - exp(x) is 1 in double. A decay of 0 adds
// this to the sum.
constexpr double kLeastLag = -40;

// The difference of two sums has the rounding of the sums. So a sum below this
// becomes kRebased, which is not zero: zero means that no row lags behind.
constexpr double kLeastLogDecay = -1e4;
constexpr double kRebased = -1;

// What the sum of a row becomes when that of all steps, `all_steps`, becomes
// kRebased: the row lags behind by as much as before.
WRAPOPT_RULE double Rebased(double log_decay, double all_steps) {
  const double lag = all_steps - log_decay;
  return kRebased - (lag > kLeastLag ? lag : kLeastLag);
}

// 1 - exp(x) for x <= 0, to about a unit in the last place; 1 from kLeastLag
// on. Not by the library's functions, which no compiler turns into vector code,
// and which are others on a GPU: CPU and GPU give the same bits.
WRAPOPT_RULE double OneMinusExp(double x) {
  x = x > kLeastLag ? x : kLeastLag;
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

#endif  // WRAPOPT_CC_KERNELS_LAGS_H_
