#include "cc/ops/apply_op.h"

namespace wrapopt {

const bool apply_adagrad_defined = DefineApplyOps(
    "Adagrad",
    "Adagrad (cc/rules/adagrad.h).",
    R"doc(
var: N variables of dtype T.
accum: Sums of squared gradients.
lr: The learning rate.
)doc");

}  // namespace wrapopt
