#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/ops/handle_shapes.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

template <bool kRef>
absl::Status EmaUpdateShape(InferenceContext* c) {
  int n, nk;
  tensorflow::DataType value_dtype, shadow_dtype;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
  TF_RETURN_IF_ERROR(c->GetAttr("NK", &nk));
  TF_RETURN_IF_ERROR(c->GetAttr("T", &value_dtype));
  TF_RETURN_IF_ERROR(c->GetAttr("S", &shadow_dtype));
  const bool low_precision = value_dtype == tensorflow::DT_HALF ||
                             value_dtype == tensorflow::DT_BFLOAT16;
  if (shadow_dtype != value_dtype &&
      !(low_precision && shadow_dtype == tensorflow::DT_FLOAT)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "shadows must be of dtype ", tensorflow::DataTypeString(value_dtype),
        ", the values'", low_precision ? ", or float" : "", ", got ",
        tensorflow::DataTypeString(shadow_dtype)));
  }
  if (nk % n != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("shadows must be N * K variables for N = ", n,
                     " values, got ", nk));
  }
  const int64_t averages = nk / n;
  ShapeHandle decays;
  if (!c->WithRank(c->input(nk + n), 1, &decays).ok() ||
      !c->Merge(decays, c->Vector(averages), &decays).ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "decays misshapen: got ", c->DebugString(c->input(nk + n)),
        " but expected [", averages,
        "] (one decay for each shadow of a value)"));
  }
  for (int i = 0; i < n; ++i) {
    const int value = nk + i;
    const std::string value_subject = absl::StrCat("values[", i, "]");
    TF_RETURN_IF_ERROR(
        CheckVariableDtype(c, value, value_subject, value_dtype));
    for (int shadow = i; shadow < nk; shadow += n) {
      const std::string subject = absl::StrCat("shadows[", shadow, "]");
      TF_RETURN_IF_ERROR(CheckVariableDtype(c, shadow, subject, shadow_dtype));
      TF_RETURN_IF_ERROR(
          CheckSameShape(c, kRef, shadow, subject, value, value_subject));
    }
  }
  return absl::OkStatus();
}

constexpr char kDoc[] = R"doc(
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
decays: [K], each in [0, 1]. 0 copies the value, 1 leaves the shadow alone.
T: dtype of the values.
S: dtype of the shadows: T, or float where T is half or bfloat16.
)doc";

}  // namespace

REGISTER_OP("Wrapopt>EmaUpdate")
    .Input("shadows: NK * resource")
    .Input("values: N * resource")
    .Input("decays: double")
    .Attr("N: int >= 1")
    .Attr("NK: int >= 1")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("S: {half, bfloat16, float, double}")
    .SetIsStateful()
    .SetShapeFn(EmaUpdateShape<false>)
    .Doc(kDoc);

// For the ref variables of TensorFlow 1 graphs.
REGISTER_OP("Wrapopt>EmaUpdateRef")
    .Input("shadows: Ref(NK * S)")
    .Input("values: Ref(N * T)")
    .Input("decays: double")
    .Attr("N: int >= 1")
    .Attr("NK: int >= 1")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("S: {half, bfloat16, float, double}")
    .SetIsStateful()
    .SetShapeFn(EmaUpdateShape<true>)
    .Doc(kDoc);

}  // namespace wrapopt
