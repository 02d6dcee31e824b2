// Gradient descent, as in Keras's SGD without momentum, with weight decay
// decoupled from the gradient (Loshchilov and Hutter 2019).
//
//   w' = (1 - lr weight_decay) w - lr g
#ifndef WRAPOPT_CC_RULES_SGDW_H_
#define WRAPOPT_CC_RULES_SGDW_H_

#include "cc/rules/maths.h"
#include "cc/rules/rule.h"

namespace wrapopt {

struct KerasSGD {
  template <class V>
  WRAPOPT_RULE static void Step(V& var, const V& grad, const V& lr,
                                const V& weight_decay) {
    const V one = ScalarLike(lr, 1);
    var = (one - lr * weight_decay) * var - lr * grad;
  }
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_SGDW_H_
