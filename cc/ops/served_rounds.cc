#include <cstdint>
#include <initializer_list>

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

using tensorflow::PartialTensorShape;
using tensorflow::shape_inference::InferenceContext;

// Checks the input `rounds` and scalars, in their order. Outputs are scalars
// but for `vectors`.
absl::Status Shapes(InferenceContext* c, InferredInputs* inputs,
                    std::initializer_list<int> vectors,
                    std::initializer_list<const char*> names) {
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->Scalar());
  for (int i : vectors) {
    c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
  }
  TF_RETURN_IF_ERROR(inputs->FindScalar("rounds"));
  for (const char* name : names) TF_RETURN_IF_ERROR(inputs->FindScalar(name));
  return absl::OkStatus();
}

absl::Status Shapes(InferenceContext* c, std::initializer_list<int> vectors,
                    std::initializer_list<const char*> names) {
  InferredInputs inputs(c);
  return Shapes(c, &inputs, vectors, names);
}

absl::Status CheckVector(InferredInputs* inputs, const char* name,
                         absl::Status (*check)(const PartialTensorShape&)) {
  PartialTensorShape shape;
  TF_RETURN_IF_ERROR(inputs->FindTensor(name, &shape));
  return check(shape);
}

absl::Status EnterShape(InferenceContext* c) {
  return Shapes(c, {1, 2},
                {"worker", "process", "round", "generation", "most_turns",
                 "turn_secs", "timeout_secs"});
}

absl::Status StageShape(InferenceContext* c) {
  return Shapes(c, {},
                {"worker", "round", "generation", "turn", "weight", "count",
                 "first"});
}

absl::Status ArriveShape(InferenceContext* c) {
  return Shapes(c, {1, 2}, {"worker", "round", "generation", "turn"});
}

absl::Status FollowShape(InferenceContext* c) {
  InferredInputs inputs(c);
  TF_RETURN_IF_ERROR(
      Shapes(c, &inputs, {}, {"round", "generation", "newest"}));
  TF_RETURN_IF_ERROR(CheckVector(&inputs, "workers", CheckWorkers));
  return CheckVector(&inputs, "turns", CheckTurns);
}

absl::Status CloseShape(InferenceContext* c) {
  return Shapes(c, {0},
                {"round", "generation", "min_workers", "timeout_secs",
                 "grace_secs"});
}

absl::Status OuterStepShape(InferenceContext* c) {
  InferredInputs inputs(c);
  TF_RETURN_IF_ERROR(Shapes(c, &inputs, {},
                            {"round", "generation", "learning_rate", "momentum",
                             "stepped"}));
  return CheckVector(&inputs, "workers", CheckWorkers);
}

absl::Status RestoreShape(InferenceContext* c) {
  return Shapes(c, {},
                {"worker", "from_generation", "round", "generation",
                 "velocities"});
}

absl::Status CenterShape(InferenceContext* c) {
  return Shapes(c, {2}, {"index"});
}

absl::Status StateShape(InferenceContext* c) { return Shapes(c, {0, 1}, {}); }

}  // namespace

REGISTER_OP("Wrapopt>AveragingEnter")
    .Input("rounds: resource")
    .Input("worker: string")
    .Input("process: int64")
    .Input("round: int64")
    .Input("generation: int64")
    .Input("most_turns: int64")
    .Input("turn_secs: double")
    .Input("timeout_secs: double")
    .Output("turn: int64")
    .Output("workers: string")
    .Output("turns: int64")
    .Output("newest: int64")
    .SetIsStateful()
    .SetShapeFn(EnterShape)
    .Doc(R"doc(
Waits for a turn to send values to the open round, at the server that leads.

rounds: From Wrapopt>AveragingRounds, with settings.
worker: The worker's name.
process: A number that no other process has. A worker whose name another process
  has taken gets an error.
round, generation: Those of the center from which the worker's values started.
most_turns: How many workers may have a turn. 0: the turn is to restore a
  center, and begins when no other worker has one.
turn_secs: After that time, the turn ends and its values are dropped.
timeout_secs: After that time without a turn, the op fails.
turn: Its number, or -1 if the values are not wanted: another round is open, it
  is closed, or the worker's values are part of it.
workers: [M] the members of the open round.
turns: [K] the turns that are alive.
newest: The newest turn.
)doc");

REGISTER_OP("Wrapopt>AveragingStage")
    .Input("rounds: resource")
    .Input("worker: string")
    .Input("round: int64")
    .Input("generation: int64")
    .Input("turn: int64")
    .Input("weight: double")
    .Input("count: int64")
    .Input("first: int64")
    .Input("values: T")
    .Output("accepted: bool")
    .Attr("T: list(" WRAPOPT_NUMBER_TYPES ") >= 1")
    .SetIsStateful()
    .SetShapeFn(StageShape)
    .Doc(R"doc(
Sends some of a worker's values to a server.

They are no part of the round until the worker arrives.

rounds: From Wrapopt>AveragingRounds, with settings.
worker: The worker's name.
round, generation: Those of the open round. With a later generation, the values
  are a center for Wrapopt>AveragingRestore.
turn: From Wrapopt>AveragingEnter.
weight: The weight of the values in the mean.
count: The number of all values: that of the center's.
first: The index of the first of `values`.
values: Vectors, of the shapes of the center's and its dtypes; half and bfloat16
  for float.
accepted: False if another round is open, it is closed, the turn is over, or the
  worker's values are part of the round.
)doc");

REGISTER_OP("Wrapopt>AveragingArrive")
    .Input("rounds: resource")
    .Input("worker: string")
    .Input("round: int64")
    .Input("generation: int64")
    .Input("turn: int64")
    .Output("accepted: bool")
    .Output("workers: string")
    .Output("turns: int64")
    .Output("newest: int64")
    .SetIsStateful()
    .SetShapeFn(ArriveShape)
    .Doc(R"doc(
Makes a worker a member of the open round, at the server that leads.

All of its values must be on all servers. The server adds them to its mean, and
the turn ends.

rounds: From Wrapopt>AveragingRounds, with settings.
worker: The worker's name.
round, generation: Those of the open round.
turn: From Wrapopt>AveragingEnter.
accepted: False if another round is open, it is closed, or the turn is over.
workers, turns, newest: As from Wrapopt>AveragingEnter.
)doc");

REGISTER_OP("Wrapopt>AveragingFollow")
    .Input("rounds: resource")
    .Input("round: int64")
    .Input("generation: int64")
    .Input("newest: int64")
    .Input("workers: string")
    .Input("turns: int64")
    .Output("accepted: bool")
    .SetIsStateful()
    .SetShapeFn(FollowShape)
    .Doc(R"doc(
Tells a server that does not lead who is a member of the open round.

The server adds the values of these workers to its mean, and drops those of
turns that are over.

rounds: From Wrapopt>AveragingRounds, with settings.
round, generation: Those of the open round.
newest, workers, turns: From Wrapopt>AveragingEnter or Wrapopt>AveragingArrive
  at the server that leads.
accepted: False if another round is open.
)doc");

REGISTER_OP("Wrapopt>AveragingClose")
    .Input("rounds: resource")
    .Input("round: int64")
    .Input("generation: int64")
    .Input("min_workers: int64")
    .Input("timeout_secs: double")
    .Input("grace_secs: double")
    .Output("workers: string")
    .SetIsStateful()
    .SetShapeFn(CloseShape)
    .Doc(R"doc(
Waits until the open round is closed, at the server that leads.

A round is closed once all workers are members. It is also closed once the
expected workers are, at least min_workers; grace_secs after min_workers are;
and after timeout_secs, if min_workers are. Otherwise, the op then fails.
Wrapopt>AveragingGather tells who is expected.

rounds: From Wrapopt>AveragingRounds, with settings.
round, generation: Those of the open round.
min_workers: A scalar in [1, num_workers].
timeout_secs: A scalar greater than 0; infinity for no deadline.
grace_secs: A scalar of at least 0, the same.
workers: [M] the members, sorted, also of the last round that has ended; none of
  other rounds.
)doc");

REGISTER_OP("Wrapopt>AveragingOuterStep")
    .Input("rounds: resource")
    .Input("round: int64")
    .Input("generation: int64")
    .Input("learning_rate: double")
    .Input("momentum: double")
    .Input("stepped: int64")
    .Input("workers: string")
    .Output("took: bool")
    .SetIsStateful()
    .SetShapeFn(OuterStepShape)
    .Doc(R"doc(
Takes the outer step of a round, and opens the next one.

In one pass over memory,

    D        = center - mean
    velocity = momentum velocity + D
    center   = center - learning_rate (D + momentum velocity)

where the mean is that of the members' values with their weights. With a
learning rate of 1 and no momentum, the center becomes the mean. The op has no
effect if the round is over, so each of the workers may run it. It runs on the
server that leads after all others.

rounds: From Wrapopt>AveragingRounds, with settings.
round, generation: Those of the open round.
learning_rate: A scalar greater than 0.
momentum: A scalar in [0, 1).
stepped: The number of values, the first ones, that take this step. The others
  become the mean.
workers: [M] the members of the round, from Wrapopt>AveragingClose; empty for
  the server that leads.
took: Whether the op has ended the round.
)doc");

REGISTER_OP("Wrapopt>AveragingRestore")
    .Input("rounds: resource")
    .Input("worker: string")
    .Input("from_generation: int64")
    .Input("round: int64")
    .Input("generation: int64")
    .Input("velocities: int64")
    .Output("restored: bool")
    .SetIsStateful()
    .SetShapeFn(RestoreShape)
    .Doc(R"doc(
Begins a new generation of a server's rounds, with the center of a worker.

The worker has sent the center by Wrapopt>AveragingStage, with this round and
generation. If it has sent none, the open round begins again, with the center
that the server has.

rounds: From Wrapopt>AveragingRounds, with settings.
worker: The worker's name.
from_generation: The server's generation. With another one, the op has no
  effect.
round: The round that begins with this center.
generation: The new generation, later than from_generation.
velocities: How many of the worker's values are velocities; they come last.
restored: Whether the generation has begun.
)doc");

REGISTER_OP("Wrapopt>AveragingCenter")
    .Input("rounds: resource")
    .Input("index: int64")
    .Output("round: int64")
    .Output("generation: int64")
    .Output("value: T")
    .Attr("T: {float, double}")
    .Attr("velocity: bool = false")
    .SetIsStateful()
    .SetShapeFn(CenterShape)
    .Doc(R"doc(
Reads a value of the center, or of its velocity.

rounds: From Wrapopt>AveragingRounds, with settings.
index: A scalar, the number of the value.
round, generation: Those that are open with this center.
value: A vector.
velocity: Whether to read the velocity of the outer steps.
)doc");

REGISTER_OP("Wrapopt>AveragingState")
    .Input("rounds: resource")
    .Output("numbers: int64")
    .Output("workers: string")
    .SetIsStateful()
    .SetShapeFn(StateShape)
    .Doc(R"doc(
The state of served averaging rounds.

rounds: From Wrapopt>AveragingRounds, with settings.
numbers: [6] the open round, its generation, whether it is closed, the number of
  values of the center, the number of velocities, and the number of workers
  whose values are no part of the round yet.
workers: [M] the members of the open round.
)doc");

}  // namespace wrapopt
