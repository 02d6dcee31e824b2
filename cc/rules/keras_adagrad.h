// Adagrad, as in Keras (Duchi et al. 2011), with weight decay decoupled
// from the gradient.
//
//   a' = a + g^2
//   w' = (1 - lr weight_decay) w - lr g / sqrt(a' + epsilon)
//
// A step with a sparse gradient decays the rows that the gradient holds.
#ifndef WRAPOPT_CC_RULES_ADAGRAD_W_H_
#define WRAPOPT_CC_RULES_ADAGRAD_W_H_

#include "cc/rules/maths.h"
#include "cc/rules/rule.h"

namespace wrapopt {

struct KerasAdagrad {
  template <class V>
  WRAPOPT_RULE static void Step(V& var, V& accum, const V& grad, const V& lr,
                                const V& epsilon, const V& weight_decay) {
    const V one = ScalarLike(lr, 1);
    accum = accum + Square(grad);
    var = (one - lr * weight_decay) * var - lr * grad / Sqrt(accum + epsilon);
  }
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_ADAGRAD_W_H_
