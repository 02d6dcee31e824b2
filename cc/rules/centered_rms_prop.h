// Centered RMSProp, as in TensorFlow's ApplyCenteredRMSProp (Graves 2013).
//
//   c' = c + (1 - rho) (g - c)
//   s' = s + (1 - rho) (g^2 - s)
//   m' = momentum m + lr g / sqrt(s' - c'^2 + epsilon)
//   w' = w - m'
//
// c is mean_grad, s is rms, m is momentum's accumulator.
#ifndef WRAPOPT_CC_RULES_CENTERED_RMS_PROP_H_
#define WRAPOPT_CC_RULES_CENTERED_RMS_PROP_H_

#include "cc/rules/maths.h"
#include "cc/rules/rule.h"

namespace wrapopt {

struct CenteredRMSProp {
  template <class V>
  WRAPOPT_RULE static void Step(V& var, V& mean_grad, V& rms, V& accum,
                                const V& grad, const V& lr, const V& rho,
                                const V& momentum, const V& epsilon) {
    const V rest = ScalarLike(rho, 1) - rho;
    rms = rms + rest * (Square(grad) - rms);
    mean_grad = mean_grad + rest * (grad - mean_grad);
    accum = momentum * accum +
            lr * grad / Sqrt(rms - Square(mean_grad) + epsilon);
    var = var - accum;
  }
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_CENTERED_RMS_PROP_H_
