#include "absl/status/status.h"
#include "cc/ops/contracts.h"
#include "cc/ops/inferred_inputs.h"
#include "cc/ops/number_types.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace wrapopt {
namespace {

using tensorflow::shape_inference::InferenceContext;

absl::Status EmaUpdateShape(InferenceContext* c, bool ref) {
  ShadowContract averages;
  TF_RETURN_IF_ERROR(averages.Init(c));
  InferredInputs inputs(c, ref);
  int shadows, values;
  TF_RETURN_IF_ERROR(inputs.FindVariables("shadows", "S", &shadows));
  TF_RETURN_IF_ERROR(inputs.FindVariables("values", "T", &values));
  TF_RETURN_IF_ERROR(inputs.FindDecays(averages));
  return averages.Check(inputs, shadows, values);
}

constexpr char kEmaUpdateDoc[] = R"doc(
Updates exponential moving averages of variables, in place.

For each of N values and each of K decays

    shadows[k * N + i] += (1 - decays[k]) * (values[i] - shadows[k * N + i])

in one pass over memory: a value is read once for all of its K shadows.
1 - decay is computed in double; half and bfloat16 are averaged in float.

All variables are checked before any is changed. Variables are locked for the
update, values in shared mode.

shadows: N * K averages: all N of the first decay, then all N of the second,
  and so on. Each has the shape of its value.
values: N variables. They are only read.
decays: [K], each in [0, 1]. 0 copies the value, 1 does not change the shadow.
T: dtype of the values.
S: dtype of the shadows: T, or float if T is half or bfloat16.
)doc";

}  // namespace

REGISTER_OP("Wrapopt>EmaUpdate")
    .Input("shadows: NK * resource")
    .Input("values: N * resource")
    .Input("decays: double")
    .Attr("N: int >= 1")
    .Attr("NK: int >= 1")
    .Attr("T: " WRAPOPT_NUMBER_TYPES)
    .Attr("S: " WRAPOPT_NUMBER_TYPES)
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return EmaUpdateShape(c, false); })
    .Doc(kEmaUpdateDoc);

// For the ref variables of TensorFlow 1 graphs.
REGISTER_OP("Wrapopt>EmaUpdateRef")
    .Input("shadows: Ref(NK * S)")
    .Input("values: Ref(N * T)")
    .Input("decays: double")
    .Attr("N: int >= 1")
    .Attr("NK: int >= 1")
    .Attr("T: " WRAPOPT_NUMBER_TYPES)
    .Attr("S: " WRAPOPT_NUMBER_TYPES)
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return EmaUpdateShape(c, true); })
    .Doc(kEmaUpdateDoc);

}  // namespace wrapopt
