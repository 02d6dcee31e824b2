// FTRL-Proximal, as in TensorFlow's ApplyFtrl and ApplyFtrlV2 with a learning
// rate power of -1/2 (McMahan et al. 2013; l2_shrinkage as in TensorFlow, in
// the loss instead of the update).
//
//   h  = g + 2 l2_shrinkage w
//   a' = a + g^2
//   z' = z + h - (sqrt(a') - sqrt(a)) / lr w
//   w' = (sign(z') l1 - z') / (sqrt(a') / lr + 2 l2)    if |z'| > l1, else 0
//
// a is accum, z is linear.
#ifndef WRAPOPT_CC_RULES_FTRL_H_
#define WRAPOPT_CC_RULES_FTRL_H_

#include "cc/rules/maths.h"
#include "cc/rules/rule.h"

namespace wrapopt {

struct Ftrl {
  template <class V>
  WRAPOPT_RULE static void Step(V& var, V& accum, V& linear, const V& grad,
                                const V& lr, const V& l1, const V& l2,
                                const V& l2_shrinkage) {
    const V zero = ScalarLike(grad, 0);
    const V two = ScalarLike(lr, 2);
    const V root = Sqrt(accum + Square(grad));
    linear = linear + (grad + two * l2_shrinkage * var) -
             (root - Sqrt(accum)) / lr * var;
    accum = accum + Square(grad);
    const V shrunk = Select(Gt(linear, zero), l1 - linear, zero - l1 - linear);
    const V size = Select(Gt(linear, zero), linear, zero - linear);
    var = Select(Gt(size, l1), shrunk / (root / lr + two * l2), zero);
  }
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_FTRL_H_
