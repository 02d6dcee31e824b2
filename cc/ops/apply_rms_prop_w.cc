#include "cc/ops/apply_op.h"

namespace wrapopt {

const bool apply_rms_prop_w_defined = DefineApplyOps(
    "RMSPropW",
    "RMSProp without momentum, with decoupled weight decay "
    "(cc/rules/rms_prop_w.h).",
    R"doc(
var: N variables of dtype T.
rms: Means of squared gradients.
lr: The learning rate.
rho: The decay of the means.
epsilon: Added to the means before the root is taken.
weight_decay: The part of a variable, times lr, that a step takes away.
)doc");

}  // namespace wrapopt
