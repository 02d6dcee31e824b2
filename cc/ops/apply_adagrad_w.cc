#include "cc/ops/apply_op.h"

namespace wrapopt {

const bool apply_adagrad_w_defined = DefineApplyOps(
    "AdagradW",
    "Adagrad, with decoupled weight decay (cc/rules/adagrad_w.h).",
    R"doc(
var: N variables of dtype T.
accum: Sums of squared gradients.
lr: The learning rate.
epsilon: Added to the sums before the root is taken.
weight_decay: The part of a variable, times lr, that a step takes away: from
  the rows that the gradient holds.
)doc");

}  // namespace wrapopt
