// One term of a weighted sum.
//
//   m' = w x         the first term
//   m' = m + w x     the others
//
//   m  sum        the sum so far                             state
//   x  source     the term                                   input
//   w  weight     its weight                                 scalar
//   is_first      1 for the first term, which ignores the    scalar
//                 old value of the sum, even a NaN
//
// Terms are multiplied by their weights before they are added, so that the mean
// of large numbers does not overflow. A term of weight 0 does not count, even
// if it is infinite or NaN. A single term of weight 1 is copied, with the sign
// of a zero.
//
// AveragingAssign takes this step for each source, and then the step of Ema
// with the sum and the op's rate for each target.
#ifndef WRAPOPT_CC_RULES_WEIGHTED_SUM_H_
#define WRAPOPT_CC_RULES_WEIGHTED_SUM_H_

#include "cc/rules/maths.h"
#include "cc/rules/rule.h"

namespace wrapopt {

struct WeightedSum {
  template <class V>
  WRAPOPT_RULE static void Step(V& sum, const V& source, const V& weight,
                                const V& is_first) {
    const V zero = ScalarLike(weight, 0);
    const V term = Select(Eq(weight, zero), zero, weight * source);
    sum = Select(Gt(is_first, ScalarLike(is_first, 0.5)), term, sum + term);
  }
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_WEIGHTED_SUM_H_
