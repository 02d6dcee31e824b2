#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "cc/ops/averaging_rounds.h"
#include "cc/ops/inferred_inputs.h"
#include "cc/ops/number_types.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def_builder.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/platform/errors.h"

namespace wrapopt {
namespace {

using tensorflow::shape_inference::InferenceContext;

absl::Status MeanShape(InferenceContext* c) {
  c->set_output(0, c->Vector(2));
  InferredInputs inputs(c);
  TF_RETURN_IF_ERROR(inputs.FindScalar("rounds"));
  tensorflow::PartialTensorShape known;
  TF_RETURN_IF_ERROR(inputs.FindTensor("known", &known));
  TF_RETURN_IF_ERROR(CheckKnown(known));
  std::vector<int64_t> sizes;
  TF_RETURN_IF_ERROR(c->GetAttr("sizes", &sizes));
  return CheckGroups(sizes, c->num_inputs() - 2);
}

}  // namespace

const bool outer_step_defined = RegisterRoundsOp(
    "Wrapopt>AveragingOuterStep",
    {"rounds: resource", "known: string", "learning_rate: double",
     "momentum: double", "stepped: int64"},
    {{"place: int64", {2}}}, R"doc(
Ends a round with an outer step of the center, which the rounds hold.

In one pass over memory,

    D        = center - mean
    velocity = momentum velocity + D
    center   = center - learning_rate (D + momentum velocity)

where the mean is that of the members' values with their weights. With a
learning rate of 1 and no momentum, the center becomes the mean. If codes
travel, the mean is that of the workers' ways from the center, D is its
opposite, and the center moves by the code of its update and of the last error.
The op has no effect if the round is over, so each of the workers may run it. It
runs on the server that leads after all others.

rounds: From Wrapopt>AveragingRounds.
known: [1 + M] from Wrapopt>AveragingClose.
learning_rate: A scalar greater than 0.
momentum: A scalar in [0, 1).
stepped: The number of vectors, the first ones, that take this step. The others
  become the mean.
place: [2] the round that is open after the op, and its generation.
)doc");

REGISTER_OP("Wrapopt>AveragingMean")
    .Input("rounds: resource")
    .Input("known: string")
    .Input("resources: N * resource")
    .Input("refs: Ref(T)")
    .Output("place: int64")
    .Attr("N: int >= 0")
    .Attr("T: list(realnumbertype) >= 0")
    .Attr("sizes: list(int) >= 0")
    .SetIsStateful()
    .SetShapeFn(MeanShape)
    .Doc(R"doc(
Ends a round with an assignment of the mean to the center, in variables.

The op also adds 1 to counters. It checks all of its inputs before it changes
any variable. It has no effect if the round is over, so each of the workers may
run it. It runs on the server that leads after all others. Use it in a graph or
in a tf.function: TensorFlow runs no op eagerly that may take refs.

rounds: From Wrapopt>AveragingRounds, without a center.
known: [1 + M] from Wrapopt>AveragingClose.
resources: Resource variables.
refs: Ref variables. All variables are different ones. A vector of the rounds
  holds the elements of some, one after another, each in row-major order. The
  others are scalars, which count the rounds.
sizes: For each vector of the rounds, the number of its variables, in the order
  of `resources` and then `refs`; 0 for a counter. The variables after these are
  counters, too. The variables of a vector have one dtype: that of the vector,
  or half or bfloat16 if that is float.
place: [2] the round that is open after the op, and its generation.
)doc");

const bool center_defined = RegisterRoundsOp(
    "Wrapopt>AveragingCenter",
    {"rounds: resource", "worker: string", "index: int64", "count: int64",
     "timeout_secs: double"},
    {{"place: int64", {2}}, {"value: T", {-1}}}, R"doc(
Reads vectors of the center, or what belongs to them.

A server replies to four workers at a time, so that its memory does not grow
with their number. The others wait until Wrapopt>AveragingRelease, or until one
of the four has read nothing for 10 seconds. Rounds wait for a worker that reads
at the server that leads, unless its name is "".

rounds: From Wrapopt>AveragingRounds.
worker: A scalar, the worker's name.
index: A scalar, the number of the first vector.
count: A scalar, how many vectors, at least 1.
timeout_secs: A scalar, how long to wait; infinity for no deadline.
place: [2] the round that is open with this center, and its generation.
value: The vectors, one after the other.
what: If it is "velocities", those of the outer steps. "errors" and "codes" are
  there if codes travel: what codes have lost, and those of the last round,
  which tell a worker that holds the center of the round before how to get to
  this one. There are none after Wrapopt>AveragingRestore.
)doc",
    {"T: {float, double, uint8}",
     "what: {'center', 'velocities', 'errors', 'codes'} = 'center'"});

}  // namespace wrapopt
