// Momentum, as in Keras's SGD, with weight decay decoupled from the gradient.
// Unlike in cc/rules/momentum.h, the velocity includes the learning rate, so a
// change of the rate does not affect past gradients.
//
//   v' = momentum v - lr g
//   w' = (1 - lr weight_decay) w + v'                      plain
//   w' = (1 - lr weight_decay) w + (momentum v' - lr g)    Nesterov
#ifndef WRAPOPT_CC_RULES_MOMENTUM_W_H_
#define WRAPOPT_CC_RULES_MOMENTUM_W_H_

#include "cc/rules/maths.h"
#include "cc/rules/rule.h"

namespace wrapopt {

struct KerasMomentum {
  template <class V>
  WRAPOPT_RULE static void Step(V& var, V& velocity, const V& grad, const V& lr,
                                const V& momentum, const V& weight_decay,
                                const V& use_nesterov) {
    const V one = ScalarLike(lr, 1);
    const V zero = ScalarLike(use_nesterov, 0);
    velocity = momentum * velocity - lr * grad;
    const V nesterov = momentum * velocity - lr * grad;
    var = (one - lr * weight_decay) * var +
          Select(Gt(use_nesterov, zero), nesterov, velocity);
  }
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_MOMENTUM_W_H_
