// How a step compensates for the age of a gradient: the weights have moved from
// those that the gradient was computed from.
//
//   d   delay    the weights now, less those of the gradient
//   g   stale    the gradient                                  input
//   g'  grad     the gradient that the step takes              state, d before
//
// Where d is 0, g' is g to the bit, even if g is infinite.
//
// Delay compensation (Zheng et al., "Asynchronous stochastic gradient descent
// with delay compensation", ICML 2017, arXiv 1609.08326):
//
//   g' = g + lambda g^2 d                                constant
//   m' = m + rate (g^2 - m)                              adaptive
//   g' = g + lambda / sqrt(m' + epsilon) g^2 d
//
//   m     mean_square  the running mean of g^2           state
//   rate  1 - decay                                      scalar
//
// Gap-aware (Barkai, Hakimi and Schuster, "Gap-aware mitigation of gradient
// staleness", ICLR 2020, arXiv 1909.10802):
//
//   g' = g / (1 + |d| / c),  c' = c - rate c             before the step
//   c" = c' + rate |w' - w|                              after it, from w to w'
//
//   c     step_size    the running mean of |w' - w|      state
//
// If c is 0, there was no step: g' is g, and c" is |w' - w|. So the first mean
// is that of one step, not of it and zeros.
//
// All results are those of arithmetic, which takes subnormal numbers as zero. A
// compiler would make a copy of x + Select(c, -0, y) or x / Select(c, 1, y).
#ifndef WRAPOPT_CC_RULES_COMPENSATION_H_
#define WRAPOPT_CC_RULES_COMPENSATION_H_

#include "cc/rules/maths.h"
#include "cc/rules/rule.h"

namespace wrapopt {

struct ConstantDelayCompensation {
  template <class V>
  WRAPOPT_RULE static void Step(V& grad, const V& stale, const V& lambda) {
    const V zero = ScalarLike(stale, 0);
    const V factor = Select(Eq(grad, zero), zero, stale);
    // In this order, g^2 does not overflow where lambda is 1 / |g|. The
    // difference with +0 keeps the sign of a zero.
    grad = stale - lambda * factor * (zero - grad) * factor;
  }
};

struct DelayCompensation {
  template <class V>
  WRAPOPT_RULE static void Step(V& mean_square, V& grad, const V& stale,
                                const V& lambda, const V& rate,
                                const V& epsilon) {
    mean_square = mean_square + rate * (Square(stale) - mean_square);
    ConstantDelayCompensation::Step(grad, stale,
                                    lambda / Sqrt(mean_square + epsilon));
  }
};

struct GapAware {
  template <class V>
  WRAPOPT_RULE static void Step(V& step_size, V& grad, const V& stale,
                                const V& rate) {
    const V zero = ScalarLike(stale, 0);
    const V distance = Max(grad, zero - grad);
    // No distance is a part of this one that counts.
    const V size =
        Select(Eq(step_size, zero), ScalarLike(stale, 1e38), step_size);
    grad = stale / (ScalarLike(stale, 1) + distance / size);
    step_size = step_size - rate * step_size;
  }
};

// After the step that GapAware was before. `before` are the weights before it,
// and becomes the step. `value` are the weights after it.
struct StepSize {
  template <class V>
  WRAPOPT_RULE static void Step(V& step_size, V& before, const V& value,
                                const V& rate) {
    const V zero = ScalarLike(rate, 0);
    before = value - before;
    const V distance = Max(before, zero - before);
    step_size = Select(Eq(step_size, zero), distance,
                       step_size + rate * distance);
  }
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_COMPENSATION_H_
