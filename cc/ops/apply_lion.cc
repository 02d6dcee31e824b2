#include "cc/ops/apply_op.h"

namespace wrapopt {

const bool apply_lion_defined = DefineApplyOps(
    "Lion",
    "Lion, with decoupled weight decay (cc/rules/lion.h).",
    R"doc(
var: N variables of dtype T.
m: Means of the gradients.
lr: The learning rate, which is also the size of a step.
beta1: The weight of m beside the gradient in the sign of a step.
beta2: The decay of m.
weight_decay: The part of a variable, times lr, that a step takes away.
)doc");

}  // namespace wrapopt
