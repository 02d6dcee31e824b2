#include "cc/ops/apply_op.h"

namespace wrapopt {

const bool apply_momentum_w_defined = DefineApplyOps(
    "MomentumW",
    "Momentum, plain or Nesterov's, with decoupled weight decay "
    "(cc/rules/momentum_w.h).",
    R"doc(
var: N variables of dtype T.
velocity: The velocities of the variables.
lr: The learning rate.
momentum: What remains of a velocity after a step.
weight_decay: The part of a variable, times lr, that a step takes away.
use_nesterov: Whether the step looks ahead.
)doc");

}  // namespace wrapopt
