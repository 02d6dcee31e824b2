#include "cc/ops/apply_op.h"

namespace wrapopt {

const bool apply_rms_prop_defined = DefineApplyOps(
    "RMSProp",
    "RMSProp (cc/rules/rms_prop.h).",
    R"doc(
var: N variables of dtype T.
rms: Means of squared gradients.
mom: The velocities of the variables.
lr: The learning rate.
rho: The decay of the means.
momentum: What remains of a velocity after a step.
epsilon: Added to the means before the root is taken.
)doc");

}  // namespace wrapopt
