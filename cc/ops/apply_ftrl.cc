#include "cc/ops/apply_op.h"

namespace wrapopt {

const bool apply_ftrl_defined = DefineApplyOps(
    "Ftrl",
    "FTRL-Proximal with a learning rate power of -1/2 (cc/rules/ftrl.h).",
    R"doc(
var: N variables of dtype T.
accum: Sums of squared gradients.
linear: The linear terms.
lr: The learning rate.
l1: L1 regularization strength.
l2: L2 regularization strength.
l2_shrinkage: L2 regularization strength of the loss.
)doc");

}  // namespace wrapopt
