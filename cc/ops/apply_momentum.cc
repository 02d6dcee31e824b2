#include "cc/ops/apply_op.h"

namespace wrapopt {

const bool apply_momentum_defined = DefineApplyOps(
    "Momentum",
    "Momentum, plain or Nesterov's (cc/rules/momentum.h).",
    R"doc(
var: N variables of dtype T.
accum: The velocities of the variables.
lr: The learning rate.
momentum: What remains of a velocity after a step.
use_nesterov: Whether the step looks ahead.
)doc");

}  // namespace wrapopt
