#include "cc/ops/apply_op.h"

namespace wrapopt {

const bool apply_sgdw_defined = DefineApplyOps(
    "SGDW",
    "Gradient descent, with decoupled weight decay (cc/rules/sgdw.h).",
    R"doc(
var: N variables of dtype T.
lr: The learning rate.
weight_decay: The part of a variable, times lr, that a step takes away: from
  the rows that the gradient holds.
)doc");

}  // namespace wrapopt
