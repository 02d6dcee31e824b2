// Adagrad, as in TensorFlow's ApplyAdagrad (Duchi et al. 2011).
//
//   a' = a + g^2
//   w' = w - lr g / sqrt(a')
#ifndef WRAPOPT_CC_RULES_ADAGRAD_H_
#define WRAPOPT_CC_RULES_ADAGRAD_H_

#include "cc/rules/maths.h"
#include "cc/rules/rule.h"

namespace wrapopt {

struct Adagrad {
  template <class V>
  WRAPOPT_RULE static void Step(V& var, V& accum, const V& grad,
                                const V& lr) {
    accum = accum + Square(grad);
    var = var - lr * grad / Sqrt(accum);
  }
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_ADAGRAD_H_
