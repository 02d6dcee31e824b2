// Momentum, as in TensorFlow's ApplyMomentum (Polyak 1964; with Nesterov's
// look-ahead, Sutskever et al. 2013).
//
//   a' = momentum a + g
//   w' = w - lr a'                          plain
//   w' = w - (lr g + lr momentum a')        Nesterov
#ifndef WRAPOPT_CC_RULES_MOMENTUM_H_
#define WRAPOPT_CC_RULES_MOMENTUM_H_

#include "cc/rules/maths.h"
#include "cc/rules/rule.h"

namespace wrapopt {

struct Momentum {
  template <class V>
  WRAPOPT_RULE static void Step(V& var, V& accum, const V& grad, const V& lr,
                                const V& momentum, const V& use_nesterov) {
    accum = momentum * accum + grad;
    const V plain = lr * accum;
    const V nesterov = lr * grad + momentum * accum * lr;
    var = var - Select(Gt(use_nesterov, ScalarLike(use_nesterov, 0)), nesterov,
                       plain);
  }
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_MOMENTUM_H_
