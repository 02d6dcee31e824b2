#include "cc/ops/packed.h"

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/ops/inferred_inputs.h"
#include "tensorflow/core/framework/op.h"
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

template <bool kRef>
absl::Status ReadShape(InferenceContext* c) {
  InferredInputs inputs(c, kRef);
  int count;
  int64_t elements;
  TF_RETURN_IF_ERROR(CountElements(c, &inputs, &count, &elements));
  c->set_output(0, c->Vector(elements));
  return absl::OkStatus();
}

template <bool kRef>
absl::Status AssignShape(InferenceContext* c) {
  InferredInputs inputs(c, kRef);
  int count;
  int64_t elements;
  TF_RETURN_IF_ERROR(CountElements(c, &inputs, &count, &elements));
  tensorflow::PartialTensorShape packed;
  TF_RETURN_IF_ERROR(inputs.FindTensor("packed", &packed));
  return CheckPacked(packed, count, elements);
}

constexpr char kReadPackedDoc[] = R"doc(
Reads variables into one vector.

The vector holds the elements of all variables, in the order of the variables,
each in row-major order. All variables are locked for reading together.

variables: N variables of dtype T.
packed: [the sum of their sizes].
)doc";

constexpr char kAssignPackedDoc[] = R"doc(
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
    .Doc(kReadPackedDoc);

// For the ref variables of TensorFlow 1 graphs.
REGISTER_OP("Wrapopt>ReadPackedRef")
    .Input("variables: Ref(N * T)")
    .Output("packed: T")
    .Attr("N: int >= 1")
    .Attr("T: {numbertype, bool}")
    .SetIsStateful()
    .SetShapeFn(ReadShape<true>)
    .Doc(kReadPackedDoc);

REGISTER_OP("Wrapopt>AssignPacked")
    .Input("variables: N * resource")
    .Input("packed: T")
    .Attr("N: int >= 1")
    .Attr("T: {numbertype, bool}")
    .SetIsStateful()
    .SetShapeFn(AssignShape<false>)
    .Doc(kAssignPackedDoc);

// For the ref variables of TensorFlow 1 graphs.
REGISTER_OP("Wrapopt>AssignPackedRef")
    .Input("variables: Ref(N * T)")
    .Input("packed: T")
    .Attr("N: int >= 1")
    .Attr("T: {numbertype, bool}")
    .SetIsStateful()
    .SetShapeFn(AssignShape<true>)
    .Doc(kAssignPackedDoc);

}  // namespace wrapopt
