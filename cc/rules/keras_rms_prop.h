// RMSProp, as in Keras's RMSprop without momentum (Tieleman and Hinton
// 2012), with weight decay decoupled from the gradient.
//
//   s' = s + (1 - rho) (g^2 - s)
//   w' = (1 - lr weight_decay) w - lr g / sqrt(s' + epsilon)
//
// s is rms.
#ifndef WRAPOPT_CC_RULES_RMS_PROP_W_H_
#define WRAPOPT_CC_RULES_RMS_PROP_W_H_

#include "cc/rules/maths.h"
#include "cc/rules/rule.h"

namespace wrapopt {

struct KerasRMSProp {
  template <class V>
  WRAPOPT_RULE static void Step(V& var, V& rms, const V& grad, const V& lr,
                                const V& rho, const V& epsilon,
                                const V& weight_decay) {
    const V one = ScalarLike(lr, 1);
    rms = rms + (one - rho) * (Square(grad) - rms);
    var = (one - lr * weight_decay) * var - lr * grad / Sqrt(rms + epsilon);
  }
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_RMS_PROP_W_H_
