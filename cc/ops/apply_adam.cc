#include "cc/ops/apply_op.h"

namespace wrapopt {

constexpr char kAdamDetails[] = R"doc(
var: N variables of dtype T.
m: First moments of the gradients.
v: Second moments of the gradients.
lr: The learning rate.
beta1: The decay of the first moments.
beta2: The decay of the second moments.
epsilon: Added to the root of the second moments.
weight_decay: The part of a variable, times lr, that a step takes away.
use_nesterov: Whether the step looks ahead.
beta1_power: beta1 to the power of the step, counted from 1.
beta2_power: beta2 to the power of the step, counted from 1.
)doc";

const bool apply_adam_defined = DefineApplyOps(
    "Adam",
    "Adam, with Nesterov's look-ahead and decoupled weight decay "
    "(cc/rules/adam.h).",
    kAdamDetails);

const bool apply_lazy_adam_defined = DefineApplyOps(
    "LazyAdam",
    "Adam of the rows that a sparse gradient holds (cc/rules/adam.h).",
    kAdamDetails);

}  // namespace wrapopt
