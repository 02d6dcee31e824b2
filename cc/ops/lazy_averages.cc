// The ops of averages of which a step moves the rows that it touches.
#include <vector>

#include "absl/status/status.h"
#include "cc/ops/averages.h"
#include "cc/ops/contracts.h"
#include "cc/ops/inferred_inputs.h"
#include "cc/ops/number_types.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace wrapopt {
namespace {

using tensorflow::PartialTensorShape;
using tensorflow::shape_inference::InferenceContext;

// The inputs that an op has beside the variables.
struct Has {
  bool indices = false, decays = false;
};

absl::Status Shape(InferenceContext* c, Has has) {
  ShadowContract averages;
  TF_RETURN_IF_ERROR(averages.Init(c));
  InferredInputs inputs(c);
  int shadows, values, log_decays;
  TF_RETURN_IF_ERROR(inputs.FindVariables("shadows", nullptr, &shadows));
  TF_RETURN_IF_ERROR(inputs.FindVariables("values", nullptr, &values));
  TF_RETURN_IF_ERROR(inputs.FindVariables("log_decays", nullptr, &log_decays));
  std::vector<PartialTensorShape> indices;
  if (has.indices) TF_RETURN_IF_ERROR(inputs.FindTensors("indices", &indices));
  if (has.decays) TF_RETURN_IF_ERROR(inputs.FindDecays(averages));
  TF_RETURN_IF_ERROR(averages.Check(inputs, shadows, values));
  TF_RETURN_IF_ERROR(averages.CheckLogDecays(inputs, log_decays, values));
  for (size_t i = 0; i < indices.size(); ++i) {
    TF_RETURN_IF_ERROR(CheckIndices(i, indices[i]));
  }
  for (int i = 0; i < c->num_outputs(); ++i) {
    tensorflow::shape_inference::ShapeHandle shape;
    TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(
        inputs.known_shape(shadows + i), &shape));
    c->set_output(i, shape);
  }
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("Wrapopt>CatchUp")
    .Input("shadows: NK * resource")
    .Input("values: N * resource")
    .Input("log_decays: NL * resource")
    .Input("indices: NI * I")
    .Attr("N: int >= 1")
    .Attr("NK: int >= 1")
    .Attr("NL: int >= 1")
    .Attr("NI: int >= 0")
    .Attr("T: " WRAPOPT_NUMBER_TYPES)
    .Attr("S: " WRAPOPT_NUMBER_TYPES)
    .Attr("I: {int32, int64} = DT_INT64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      return Shape(c, {.indices = true});
    })
    .Doc(R"doc(
Brings averages up to date of which steps have moved some rows only.

A step that leaves a row of a value as it is moves the row's average towards a
constant, and several such steps do so by the product of their decays. So a step
of Apply or SparseEmaUpdate with log decays leaves such rows alone. This op
makes up for all steps that a row has missed, as long as the value is still what
it was in them:

    shadow[r] += (1 - exp(log_decays[R] - log_decays[r])) (value[r] - shadow[r])

for each row r of R rows. Call it before the averages are read or written, and
before anything but these ops changes the values.

shadows: N * K averages: all N of the first decay, then all N of the second,
  and so on. Each has the shape of its value.
values: N variables with rows. They are only read.
log_decays: One for each shadow, of shape [R + 2] and dtype double. Element R is
  the sum of log(decay) over all steps; element r is that sum when row r was
  last up to date. The last element tells the ops where the buffer of the value
  was in the last step: if another op has replaced the value since, while rows
  lag behind, the next op logs an error. Before a sum is less than -10000, all
  become smaller by the same number. One without a value counts as zeros, and
  means that all rows are up to date: then this op needs no value of the others.
indices: None: all rows catch up, and the log decays become zeros. Or N
  vectors: these rows do.
T: dtype of the values.
S: dtype of the shadows: T, or float where T is half or bfloat16.
)doc");

REGISTER_OP("Wrapopt>ReadAverages")
    .Input("shadows: NK * resource")
    .Input("values: N * resource")
    .Input("log_decays: NL * resource")
    .Output("averages: NK * S")
    .Attr("N: int >= 1")
    .Attr("NK: int >= 1")
    .Attr("NL: int >= 1")
    .Attr("T: " WRAPOPT_NUMBER_TYPES)
    .Attr("S: " WRAPOPT_NUMBER_TYPES)
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return Shape(c, {}); })
    .Doc(R"doc(
Reads averages of which steps have moved some rows only.

As CatchUp of all rows, and then ReadVariableOp of the averages, but no step can
come in between.

shadows: As in CatchUp.
values: As in CatchUp.
log_decays: As in CatchUp.
averages: The value of each shadow.
T: dtype of the values.
S: dtype of the shadows: T, or float where T is half or bfloat16.
)doc");

REGISTER_OP("Wrapopt>SparseEmaUpdate")
    .Input("shadows: NK * resource")
    .Input("values: N * resource")
    .Input("log_decays: NL * resource")
    .Input("indices: N * I")
    .Input("decays: double")
    .Attr("N: int >= 1")
    .Attr("NK: int >= 1")
    .Attr("NL: int >= 1")
    .Attr("T: " WRAPOPT_NUMBER_TYPES)
    .Attr("S: " WRAPOPT_NUMBER_TYPES)
    .Attr("I: {int32, int64}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      return Shape(c, {.indices = true, .decays = true});
    })
    .Doc(R"doc(
Updates averages of variables after a step that has changed some of their rows.

As EmaUpdate, at the cost of these rows: the others lag behind until CatchUp.
Before the step that changes them, the rows must have caught up: run CatchUp
with the same indices.

shadows: N * K averages: all N of the first decay, then all N of the second,
  and so on. Each has the shape of its value.
values: N variables with rows. They are only read.
log_decays: As in CatchUp.
indices: N vectors: the rows of each value that the step has changed. A row may
  be named several times, and moves once.
decays: [K], each in [0, 1].
T: dtype of the values.
S: dtype of the shadows: T, or float where T is half or bfloat16.
)doc");

}  // namespace wrapopt
