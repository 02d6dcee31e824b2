#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/ops/handle_shapes.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// The number of elements of all variables, which are the first inputs, if
// known.
template <bool kRef>
absl::Status CountElements(InferenceContext* c, DimensionHandle* elements) {
  int n;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
  tensorflow::DataType dtype;
  TF_RETURN_IF_ERROR(c->GetAttr("T", &dtype));
  *elements = c->MakeDim(0);
  for (int i = 0; i < n; ++i) {
    if (!kRef) {
      TF_RETURN_IF_ERROR(CheckVariableDtype(
          c, i, absl::StrCat("variables[", i, "]"), dtype));
    }
    TF_RETURN_IF_ERROR(
        c->Add(*elements, c->NumElements(VariableShape(c, i, kRef)), elements));
  }
  return absl::OkStatus();
}

template <bool kRef>
absl::Status ReadShape(InferenceContext* c) {
  DimensionHandle elements;
  TF_RETURN_IF_ERROR(CountElements<kRef>(c, &elements));
  c->set_output(0, c->Vector(elements));
  return absl::OkStatus();
}

template <bool kRef>
absl::Status AssignShape(InferenceContext* c) {
  DimensionHandle elements;
  TF_RETURN_IF_ERROR(CountElements<kRef>(c, &elements));
  const ShapeHandle got = c->input(c->num_inputs() - 1);
  const ShapeHandle expected = c->Vector(elements);
  ShapeHandle merged;
  if (c->Merge(got, expected, &merged).ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "packed misshapen: got ", c->DebugString(got), " but expected ",
      c->DebugString(expected), " (the elements of all variables)"));
}

constexpr char kReadDoc[] = R"doc(
Reads variables into one vector.

The vector holds the elements of all variables, in the order of the variables,
each in row-major order. All variables are locked for reading together.

variables: N variables of dtype T.
packed: [the sum of their sizes].
)doc";

constexpr char kAssignDoc[] = R"doc(
Assigns the parts of one vector to variables, in place.

The vector holds the elements of all variables, in the order of the variables,
each in row-major order. All inputs are checked before any variable is changed.

variables: N variables of dtype T, all different. Each keeps its shape.
packed: [the sum of their sizes].
)doc";

}  // namespace

REGISTER_OP("Wrapopt>ReadPacked")
    .Input("variables: N * resource")
    .Output("packed: T")
    .Attr("N: int >= 1")
    .Attr("T: {numbertype, bool}")
    .SetIsStateful()
    .SetShapeFn(ReadShape<false>)
    .Doc(kReadDoc);

// For the ref variables of TensorFlow 1 graphs.
REGISTER_OP("Wrapopt>ReadPackedRef")
    .Input("variables: Ref(N * T)")
    .Output("packed: T")
    .Attr("N: int >= 1")
    .Attr("T: {numbertype, bool}")
    .SetIsStateful()
    .SetShapeFn(ReadShape<true>)
    .Doc(kReadDoc);

REGISTER_OP("Wrapopt>AssignPacked")
    .Input("variables: N * resource")
    .Input("packed: T")
    .Attr("N: int >= 1")
    .Attr("T: {numbertype, bool}")
    .SetIsStateful()
    .SetShapeFn(AssignShape<false>)
    .Doc(kAssignDoc);

// For the ref variables of TensorFlow 1 graphs.
REGISTER_OP("Wrapopt>AssignPackedRef")
    .Input("variables: Ref(N * T)")
    .Input("packed: T")
    .Attr("N: int >= 1")
    .Attr("T: {numbertype, bool}")
    .SetIsStateful()
    .SetShapeFn(AssignShape<true>)
    .Doc(kAssignDoc);

}  // namespace wrapopt
