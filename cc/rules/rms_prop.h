// RMSProp, as in TensorFlow's ApplyRMSProp (Tieleman and Hinton 2012).
//
//   s' = s + (1 - rho) (g^2 - s)
//   m' = momentum m + lr g / sqrt(s' + epsilon)
//   w' = w - m'
//
// s is rms, m is momentum's accumulator.
#ifndef WRAPOPT_CC_RULES_RMS_PROP_H_
#define WRAPOPT_CC_RULES_RMS_PROP_H_

#include "cc/rules/maths.h"
#include "cc/rules/rule.h"

namespace wrapopt {

struct RMSProp {
  template <class V>
  WRAPOPT_RULE static void Step(V& var, V& rms, V& accum, const V& grad,
                                const V& lr, const V& rho, const V& momentum,
                                const V& epsilon) {
    rms = rms + (ScalarLike(rho, 1) - rho) * (Square(grad) - rms);
    accum = momentum * accum + lr * grad / Sqrt(rms + epsilon);
    var = var - accum;
  }
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_RMS_PROP_H_
