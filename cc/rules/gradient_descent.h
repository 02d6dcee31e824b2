// Gradient descent, as in TensorFlow's ApplyGradientDescent.
//
//   w' = w - lr g
#ifndef WRAPOPT_CC_RULES_GRADIENT_DESCENT_H_
#define WRAPOPT_CC_RULES_GRADIENT_DESCENT_H_

#include "cc/rules/maths.h"
#include "cc/rules/rule.h"

namespace wrapopt {

struct GradientDescent {
  template <class V>
  WRAPOPT_RULE static void Step(V& var, const V& grad, const V& lr) {
    var = var - lr * grad;
  }
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_GRADIENT_DESCENT_H_
