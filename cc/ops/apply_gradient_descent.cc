#include "cc/ops/apply_op.h"

namespace wrapopt {

const bool apply_gradient_descent_defined = DefineApplyOps(
    "GradientDescent",
    "Gradient descent (cc/rules/gradient_descent.h).",
    R"doc(
var: N variables of dtype T.
lr: The learning rate.
)doc");

}  // namespace wrapopt
