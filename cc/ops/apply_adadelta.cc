#include "cc/ops/apply_op.h"

namespace wrapopt {

const bool apply_adadelta_defined = DefineApplyOps(
    "Adadelta",
    "Adadelta (cc/rules/adadelta.h).",
    R"doc(
var: N variables of dtype T.
accum: Means of squared gradients.
accum_update: Means of squared updates.
lr: The learning rate.
rho: The decay of the means.
epsilon: Added to the means before the root is taken.
)doc");

}  // namespace wrapopt
