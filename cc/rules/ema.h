// Exponential moving average of a value.
//
//   s' = s + r (v - s),   r = 1 - decay
//
//   s  shadow    the average                         state
//   v  value     the averaged value                  input
//   r  rate      1 - decay, in [0, 1]                scalar
//
// Three roundings per element: the difference, the product, the sum. Unlike
// decay * s + r * v, this form does not change s if s == v.
//
// At the ends the result is exact, even for infinity and NaN: r = 0 does not
// change s, r = 1 copies v. The CPU engine and the GPU's launcher leave out a
// step of r = 0, see Pass::Stage::is_idle.
#ifndef WRAPOPT_CC_RULES_EMA_H_
#define WRAPOPT_CC_RULES_EMA_H_

#include "cc/rules/maths.h"
#include "cc/rules/rule.h"

namespace wrapopt {

struct Ema {
  template <class V>
  WRAPOPT_RULE static void Step(V& shadow, const V& value, const V& rate) {
    const V moved = shadow + rate * (value - shadow);
    const V end = Select(Eq(rate, ScalarLike(rate, 0)), shadow, moved);
    shadow = Select(Eq(rate, ScalarLike(rate, 1)), value, end);
  }
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_EMA_H_
