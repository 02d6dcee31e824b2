#include "cc/ops/apply_op.h"

namespace wrapopt {

const bool apply_centered_rms_prop_w_defined = DefineApplyOps(
    "CenteredRMSPropW",
    "Centered RMSProp without momentum, with decoupled weight decay "
    "(cc/rules/centered_rms_prop_w.h).",
    R"doc(
var: N variables of dtype T.
mg: Means of gradients.
rms: Means of squared gradients.
lr: The learning rate.
rho: The decay of the means.
epsilon: Added to the variances before the root is taken.
weight_decay: The part of a variable, times lr, that a step takes away.
)doc");

}  // namespace wrapopt
