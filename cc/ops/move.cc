#include "absl/status/status.h"
#include "cc/ops/exchange.h"
#include "cc/ops/inferred_inputs.h"
#include "cc/ops/registration.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace wrapopt {
namespace {

using tensorflow::shape_inference::InferenceContext;

absl::Status MoveShape(InferenceContext* c, bool ref) {
  InferredInputs inputs(c, ref);
  int from, to;
  TF_RETURN_IF_ERROR(inputs.FindVariables("from", "T", &from));
  TF_RETURN_IF_ERROR(inputs.FindVariables("to", "T", &to));
  for (int i = 0; i < to - from; ++i) {
    TF_RETURN_IF_ERROR(CheckExchange(inputs, from + i, to + i));
  }
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

absl::Status CheckInitializedShape(InferenceContext*, bool) {
  return absl::OkStatus();
}

}  // namespace

const bool move_defined = RegisterWithRef(
    "Wrapopt>Move", MoveShape, [](auto& op, bool ref) {
      op.Input(ref ? "from: Ref(N * T)" : "from: N * resource");
      op.Input(ref ? "to: Ref(N * T)" : "to: N * resource");
      op.Output("replaced: bool");
      op.Attr("N: int >= 1");
      if (ref) op.Attr("T: type").SetAllowsUninitializedInput();
      op.Doc(R"doc(
Moves the values of variables to others: to[i] gets the buffer of from[i], which
has no value afterwards.

TensorFlow refuses to read a variable without a value, and every op of wrapopt
refuses to use it. All variables are checked before any is changed.

from: N variables, all different and different from those in `to`.
to: N variables, which need not have a value. to[i] has the dtype and shape of
  from[i].
replaced: Whether any variable in `to` had a value with elements. It is lost.
)doc");
    });

const bool check_initialized_defined = RegisterWithRef(
    "Wrapopt>CheckInitialized", CheckInitializedShape, [](auto& op, bool ref) {
      op.Input(ref ? "variables: Ref(N * T)" : "variables: N * resource");
      op.Attr("N: int >= 1");
      if (ref) op.Attr("T: type").SetAllowsUninitializedInput();
      op.Doc(R"doc(
Fails if a variable has no value.

If XLA compiles it, the compiler checks the variables, and the program does not
contain the op.

variables: N variables.
)doc");
    });

}  // namespace wrapopt
