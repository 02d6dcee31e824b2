#include "cc/ops/packed.h"

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/ops/inferred_inputs.h"
#include "cc/ops/registration.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {

using tensorflow::PartialTensorShape;
using tensorflow::shape_inference::InferenceContext;

absl::Status CheckPacked(const PartialTensorShape& shape, int count,
                         int64_t elements) {
  return CheckShape("packed", shape, Vector(elements),
                    absl::StrCat("the elements of all ", count, " variables"));
}

namespace {

// The number of variables, and the elements of all, -1 if that is not known.
absl::Status CountElements(InferenceContext* c, InferredInputs* inputs,
                           int* count, int64_t* elements) {
  int first;
  tensorflow::DataType dtype;
  TF_RETURN_IF_ERROR(c->GetAttr("N", count));
  TF_RETURN_IF_ERROR(c->GetAttr("T", &dtype));
  TF_RETURN_IF_ERROR(inputs->FindVariables("variables", "T", &first));
  return inputs->CountElements(first, *count, dtype, elements);
}

absl::Status ReadShape(InferenceContext* c, bool ref) {
  InferredInputs inputs(c, ref);
  int count;
  int64_t elements;
  TF_RETURN_IF_ERROR(CountElements(c, &inputs, &count, &elements));
  c->set_output(0, c->Vector(elements));
  return absl::OkStatus();
}

absl::Status AssignShape(InferenceContext* c, bool ref) {
  InferredInputs inputs(c, ref);
  int count;
  int64_t elements;
  TF_RETURN_IF_ERROR(CountElements(c, &inputs, &count, &elements));
  tensorflow::PartialTensorShape packed;
  TF_RETURN_IF_ERROR(inputs.FindTensor("packed", &packed));
  return CheckPacked(packed, count, elements);
}

}  // namespace

const bool read_packed_defined = RegisterWithRef(
    "Wrapopt>ReadPacked", ReadShape, [](auto& op, bool ref) {
      op.Input(ref ? "variables: Ref(N * T)" : "variables: N * resource");
      op.Output("packed: T");
      op.Attr("N: int >= 1");
      op.Attr("T: {numbertype, bool}");
      op.Doc(R"doc(
Reads variables into one vector.

The vector holds the elements of all variables, in the order of the variables,
each in row-major order. All variables are locked for reading together.

variables: N variables of dtype T.
packed: [the sum of their sizes].
)doc");
    });

const bool assign_packed_defined = RegisterWithRef(
    "Wrapopt>AssignPacked", AssignShape, [](auto& op, bool ref) {
      op.Input(ref ? "variables: Ref(N * T)" : "variables: N * resource");
      op.Input("packed: T");
      op.Attr("N: int >= 1");
      op.Attr("T: {numbertype, bool}");
      op.Doc(R"doc(
Assigns the parts of one vector to variables, in place.

The vector holds the elements of all variables, in the order of the variables,
each in row-major order. All inputs are checked before any variable is changed.

variables: N variables of dtype T, all different. Each keeps its shape.
packed: [the sum of their sizes].
)doc");
    });

}  // namespace wrapopt
