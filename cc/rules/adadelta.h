// Adadelta, as in TensorFlow's ApplyAdadelta (Zeiler 2012).
//
//   a' = rho a + (1 - rho) g^2
//   u  = sqrt(d + epsilon) / sqrt(a' + epsilon) g
//   d' = rho d + (1 - rho) u^2
//   w' = w - lr u
//
// a is accum, d is accum_update.
#ifndef WRAPOPT_CC_RULES_ADADELTA_H_
#define WRAPOPT_CC_RULES_ADADELTA_H_

#include "cc/rules/maths.h"
#include "cc/rules/rule.h"

namespace wrapopt {

struct Adadelta {
  template <class V>
  WRAPOPT_RULE static void Step(V& var, V& accum, V& accum_update,
                                const V& grad, const V& lr, const V& rho,
                                const V& epsilon) {
    const V rest = ScalarLike(rho, 1) - rho;
    accum = rho * accum + rest * Square(grad);
    const V update =
        Sqrt(accum_update + epsilon) / Sqrt(accum + epsilon) * grad;
    accum_update = rho * accum_update + rest * Square(update);
    var = var - lr * update;
  }
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_ADADELTA_H_
