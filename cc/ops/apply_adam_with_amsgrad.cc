#include "cc/ops/apply_op.h"

namespace wrapopt {

const bool apply_adam_with_amsgrad_defined = DefineApplyOps(
    "AdamWithAmsgrad",
    "Adam by the largest second moment so far (cc/rules/adam_with_amsgrad.h).",
    R"doc(
var: N variables of dtype T.
m: First moments of the gradients.
v: Second moments of the gradients.
vhat: The largest second moments so far.
lr: The learning rate.
beta1: The decay of the first moments.
beta2: The decay of the second moments.
epsilon: Added to the root of the second moments.
weight_decay: The part of a variable, times lr, that a step takes away.
beta1_power: beta1 to the power of the step, counted from 1.
beta2_power: beta2 to the power of the step, counted from 1.
)doc");

}  // namespace wrapopt
