// Lion, as in Keras (Chen et al. 2023, algorithm 2; weight decay decoupled
// from the gradient).
//
//   u  = beta1 m + (1 - beta1) g
//   w' = (1 - lr weight_decay) w - lr sign(u)
//   m' = beta2 m + (1 - beta2) g
//
// sign(u) is u if u is a zero or a NaN.
#ifndef WRAPOPT_CC_RULES_LION_H_
#define WRAPOPT_CC_RULES_LION_H_

#include "cc/rules/maths.h"
#include "cc/rules/rule.h"

namespace wrapopt {

struct Lion {
  template <class V>
  WRAPOPT_RULE static void Step(V& var, V& m, const V& grad, const V& lr,
                                const V& beta1, const V& beta2,
                                const V& weight_decay) {
    const V one = ScalarLike(lr, 1);
    const V zero = ScalarLike(grad, 0);
    const V mixed = beta1 * m + (one - beta1) * grad;
    const V not_positive = Select(Gt(zero, mixed), ScalarLike(grad, -1), mixed);
    const V sign = Select(Gt(mixed, zero), ScalarLike(grad, 1), not_positive);
    var = (one - lr * weight_decay) * var - lr * sign;
    m = beta2 * m + (one - beta2) * grad;
  }
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_LION_H_
