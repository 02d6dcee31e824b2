// Adam, as in TensorFlow's ApplyAdam (Kingma and Ba 2015, the efficient form in
// section 2; Nesterov's look-ahead, Dozat 2016; weight decay decoupled from the
// gradient, Loshchilov and Hutter 2019).
//
//   r  = lr sqrt(1 - beta2^t) / (1 - beta1^t)
//   m' = m + (1 - beta1) (g - m)
//   v' = v + (1 - beta2) (g^2 - v)
//   n  = m'                                  plain
//   n  = beta1 m' + (1 - beta1) g            Nesterov
//   w' = (1 - lr weight_decay) w - r n / (sqrt(v') + epsilon)
//
// epsilon is added to sqrt(v'), outside of the square root and without bias
// correction: the paper's epsilon hat.
#ifndef WRAPOPT_CC_RULES_ADAM_H_
#define WRAPOPT_CC_RULES_ADAM_H_

#include "cc/rules/maths.h"
#include "cc/rules/rule.h"

namespace wrapopt {

struct Adam {
  template <class V>
  WRAPOPT_RULE static void Step(V& var, V& m, V& v, const V& grad, const V& lr,
                                const V& beta1, const V& beta2,
                                const V& epsilon, const V& weight_decay,
                                const V& use_nesterov, const V& beta1_power,
                                const V& beta2_power) {
    const V one = ScalarLike(lr, 1);
    const V rate = lr * Sqrt(one - beta2_power) / (one - beta1_power);
    m = m + (one - beta1) * (grad - m);
    v = v + (one - beta2) * (Square(grad) - v);
    const V direction = Select(Gt(use_nesterov, ScalarLike(use_nesterov, 0)),
                               beta1 * m + (one - beta1) * grad, m);
    var = (one - lr * weight_decay) * var -
          rate * direction / (Sqrt(v) + epsilon);
  }
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_ADAM_H_
