#include "absl/status/status.h"
#include "cc/ops/contracts.h"
#include "cc/ops/inferred_inputs.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def_builder.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/platform/errors.h"

namespace wrapopt {
namespace {

using tensorflow::PartialTensorShape;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status EncodeShape(InferenceContext* c) {
  InferredInputs inputs(c);
  PartialTensorShape values, shape;
  TF_RETURN_IF_ERROR(inputs.FindTensor("values", &values));
  TF_RETURN_IF_ERROR(CheckShape("values", values, Vector(-1), "a vector"));
  for (const char* const name : {"center", "error"}) {
    TF_RETURN_IF_ERROR(inputs.FindTensor(name, &shape));
    TF_RETURN_IF_ERROR(CheckShape(name, shape, values, "that of values"));
  }
  c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
  ShapeHandle vector;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &vector));
  c->set_output(1, vector);
  return absl::OkStatus();
}

absl::Status AddDecodedShape(InferenceContext* c) {
  InferredInputs inputs(c);
  for (const char* const name : {"center", "code"}) {
    PartialTensorShape shape;
    TF_RETURN_IF_ERROR(inputs.FindTensor(name, &shape));
    TF_RETURN_IF_ERROR(CheckShape(name, shape, Vector(-1), "a vector"));
  }
  ShapeHandle vector;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &vector));
  c->set_output(0, vector);
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("Wrapopt>Encode")
    .Input("values: T")
    .Input("center: float")
    .Input("error: float")
    .Output("code: uint8")
    .Output("new_error: float")
    .Attr("T: {half, bfloat16, float}")
    .Attr("dtype: {'bfloat16', 'int8', 'int4'}")
    .SetShapeFn(EncodeShape)
    .Doc(R"doc(
Encodes how far values are from a center, in few bits, and tells what is lost.

In one pass over memory, and in float, x = values - center + error is encoded,
and new_error = x - the decoded number. If each error is added to the next
values, what is lost comes later.

The code of bfloat16 is the rounded numbers. Other codes are blocks of 128
numbers, of which the last one may have fewer: a float in the machine's order of
bytes, the scale; then integers, round(x / scale) to nearest, ties to even. The
scale is max |x| / 127 for int8, and max |x| / 7 for int4, of which two are in a
byte, the first one in its low bits. A number is decoded as integer * scale. In
a block of zeros, the scale is 0. In one with a number that is not finite, it is
NaN.

values: [N].
center: [N].
error: [N] what the last code has lost, or zeros.
code: [C].
new_error: [N].
dtype: Of the numbers in the code.
)doc");

REGISTER_OP("Wrapopt>AddDecoded")
    .Input("center: float")
    .Input("code: uint8")
    .Output("sum: float")
    .Attr("dtype: {'bfloat16', 'int8', 'int4'}")
    .SetShapeFn(AddDecodedShape)
    .Doc(R"doc(
Adds the numbers of a code to a center, in one pass over memory.

center: [N].
code: [C] from Wrapopt>Encode, of N numbers; or the codes of several vectors of
  N numbers together, one after the other, of which all but the last have whole
  blocks.
sum: [N].
dtype: As in Wrapopt>Encode.
)doc");

}  // namespace wrapopt
