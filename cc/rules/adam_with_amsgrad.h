// Adam that divides by the largest second moment so far, as in TensorFlow's
// ApplyAdamWithAmsgrad (Reddi et al. 2018).
//
//   r  = lr sqrt(1 - beta2^t) / (1 - beta1^t)
//   m' = m + (1 - beta1) (g - m)
//   v' = v + (1 - beta2) (g^2 - v)
//   h' = max(h, v')
//   w' = (1 - lr weight_decay) w - r m' / (sqrt(h') + epsilon)
//
// h is vhat.
#ifndef WRAPOPT_CC_RULES_ADAM_WITH_AMSGRAD_H_
#define WRAPOPT_CC_RULES_ADAM_WITH_AMSGRAD_H_

#include "cc/rules/maths.h"
#include "cc/rules/rule.h"

namespace wrapopt {

struct AdamWithAmsgrad {
  template <class V>
  WRAPOPT_RULE static void Step(V& var, V& m, V& v, V& vhat, const V& grad,
                                const V& lr, const V& beta1, const V& beta2,
                                const V& epsilon, const V& weight_decay,
                                const V& beta1_power, const V& beta2_power) {
    const V one = ScalarLike(lr, 1);
    const V rate = lr * Sqrt(one - beta2_power) / (one - beta1_power);
    m = m + (one - beta1) * (grad - m);
    v = v + (one - beta2) * (Square(grad) - v);
    vhat = Max(vhat, v);
    var = (one - lr * weight_decay) * var - rate * m / (Sqrt(vhat) + epsilon);
  }
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_ADAM_WITH_AMSGRAD_H_
