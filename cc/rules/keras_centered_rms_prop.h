// Centered RMSProp, as in Keras's RMSprop without momentum (Graves 2013),
// with weight decay decoupled from the gradient.
//
//   c' = c + (1 - rho) (g - c)
//   s' = s + (1 - rho) (g^2 - s)
//   w' = (1 - lr weight_decay) w - lr g / sqrt(s' - c'^2 + epsilon)
//
// c is mean_grad, s is rms.
#ifndef WRAPOPT_CC_RULES_CENTERED_RMS_PROP_W_H_
#define WRAPOPT_CC_RULES_CENTERED_RMS_PROP_W_H_

#include "cc/rules/maths.h"
#include "cc/rules/rule.h"

namespace wrapopt {

struct KerasCenteredRMSProp {
  template <class V>
  WRAPOPT_RULE static void Step(V& var, V& mean_grad, V& rms, const V& grad,
                                const V& lr, const V& rho, const V& epsilon,
                                const V& weight_decay) {
    const V one = ScalarLike(lr, 1);
    rms = rms + (one - rho) * (Square(grad) - rms);
    mean_grad = mean_grad + (one - rho) * (grad - mean_grad);
    var = (one - lr * weight_decay) * var -
          lr * grad / Sqrt(rms - Square(mean_grad) + epsilon);
  }
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_CENTERED_RMS_PROP_W_H_
