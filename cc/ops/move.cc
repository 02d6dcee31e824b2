#include "absl/status/status.h"
#include "cc/ops/exchange.h"
#include "cc/ops/inferred_inputs.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace wrapopt {
namespace {

using tensorflow::shape_inference::InferenceContext;

template <bool kRef>
absl::Status MoveShape(InferenceContext* c) {
  InferredInputs inputs(c, kRef);
  int from, to;
  TF_RETURN_IF_ERROR(inputs.FindVariables("from", "T", &from));
  TF_RETURN_IF_ERROR(inputs.FindVariables("to", "T", &to));
  for (int i = 0; i < to - from; ++i) {
    TF_RETURN_IF_ERROR(CheckExchange(inputs, from + i, to + i));
  }
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

constexpr char kMoveDoc[] = R"doc(
Moves the values of variables to others: to[i] gets the buffer of from[i], which
has no value afterwards.

TensorFlow refuses to read a variable without a value, and every op of wrapopt
refuses to use it. All variables are checked before any is changed.

from: N variables, all different and different from those in `to`.
to: N variables, which need not have a value. to[i] has the dtype and shape of
  from[i].
replaced: Whether any variable in `to` had a value with elements. It is lost.
)doc";

constexpr char kCheckInitializedDoc[] = R"doc(
Fails if a variable has no value.

If XLA compiles it, the compiler checks the variables, and the program does not
contain the op.

variables: N variables.
)doc";

}  // namespace

REGISTER_OP("Wrapopt>Move")
    .Input("from: N * resource")
    .Input("to: N * resource")
    .Output("replaced: bool")
    .Attr("N: int >= 1")
    .SetIsStateful()
    .SetShapeFn(MoveShape<false>)
    .Doc(kMoveDoc);

// For the ref variables of TensorFlow 1 graphs.
REGISTER_OP("Wrapopt>MoveRef")
    .Input("from: Ref(N * T)")
    .Input("to: Ref(N * T)")
    .Output("replaced: bool")
    .Attr("N: int >= 1")
    .Attr("T: type")
    .SetIsStateful()
    .SetAllowsUninitializedInput()
    .SetShapeFn(MoveShape<true>)
    .Doc(kMoveDoc);

REGISTER_OP("Wrapopt>CheckInitialized")
    .Input("variables: N * resource")
    .Attr("N: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext*) { return absl::OkStatus(); })
    .Doc(kCheckInitializedDoc);

// For the ref variables of TensorFlow 1 graphs.
REGISTER_OP("Wrapopt>CheckInitializedRef")
    .Input("variables: Ref(N * T)")
    .Attr("N: int >= 1")
    .Attr("T: type")
    .SetIsStateful()
    .SetAllowsUninitializedInput()
    .SetShapeFn([](InferenceContext*) { return absl::OkStatus(); })
    .Doc(kCheckInitializedDoc);

}  // namespace wrapopt
