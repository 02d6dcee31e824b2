#include "absl/status/status.h"
#include "cc/ops/averages.h"
#include "cc/ops/inferred_inputs.h"
#include "cc/ops/number_types.h"
#include "cc/ops/registration.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace wrapopt {
namespace {

using tensorflow::shape_inference::InferenceContext;

absl::Status EmaUpdateShape(InferenceContext* c, bool ref) {
  ShadowContract averages;
  TF_RETURN_IF_ERROR(averages.Init(c));
  InferredInputs inputs(c, ref);
  TF_RETURN_IF_ERROR(inputs.FindVariables(averages.Lists()));
  TF_RETURN_IF_ERROR(inputs.FindDecays(averages));
  return averages.Check(inputs, /*shadows=*/0, averages.count());
}

}  // namespace

const bool ema_update_defined = RegisterWithRef(
    "Wrapopt>EmaUpdate", EmaUpdateShape, [](auto& op, bool ref) {
      op.Input(ref ? "variables: Ref(V)" : "variables: NV * resource");
      op.Input("decays: double");
      op.Attr(ref ? "V: list(" WRAPOPT_NUMBER_TYPES ") >= 1" : "NV: int >= 1");
      op.Attr("N: int >= 1");
      op.Attr("NK: int >= 1");
      op.Attr("T: " WRAPOPT_NUMBER_TYPES);
      op.Attr("S: " WRAPOPT_NUMBER_TYPES);
      op.Doc(R"doc(
Updates exponential moving averages of variables, in place.

For each of N values and each of K decays

    shadows[k * N + i] += (1 - decays[k]) * (values[i] - shadows[k * N + i])

in one pass over memory: a value is read once for all of its K shadows.
1 - decay is computed in double; half and bfloat16 are averaged in float.

All variables are checked before any is changed. Variables are locked for the
update, values in shared mode.

variables: N * K shadows: all N of the first decay, then all N of the second,
  and so on; N values, which are only read. A shadow has the shape of its value.
  A tensor may hold the handles of several variables: see Wrapopt>Bundle.
decays: [K], each in [0, 1]. 0 copies the value, 1 does not change the shadow.
NK: N * K.
T: dtype of the values.
S: dtype of the shadows: T, or float if T is half or bfloat16.
)doc");
    });

}  // namespace wrapopt
