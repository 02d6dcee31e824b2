#include "cc/ops/averaging_rounds.h"

#include <cstdint>
#include <initializer_list>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/ops/inferred_inputs.h"
#include "cc/ops/number_types.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def_builder.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/errors.h"

namespace wrapopt {

using tensorflow::PartialTensorShape;
using tensorflow::shape_inference::InferenceContext;

absl::Status CheckTimeout(double timeout_secs) {
  if (timeout_secs > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "timeout_secs must be greater than 0, infinity for no deadline, got ",
      timeout_secs));
}

absl::Status CheckWorkers(const PartialTensorShape& shape) {
  if (shape.IsCompatibleWith(PartialTensorShape({-1}))) return absl::OkStatus();
  return Misshapen("workers", shape, "[M]", "names of workers");
}

absl::Status CheckTurns(const PartialTensorShape& shape) {
  if (shape.IsCompatibleWith(PartialTensorShape({-1}))) return absl::OkStatus();
  return Misshapen("turns", shape, "[K]", "numbers of turns");
}

namespace {

absl::Status FindScalars(InferredInputs* inputs,
                         std::initializer_list<const char*> names) {
  for (const char* name : names) {
    TF_RETURN_IF_ERROR(inputs->FindScalar(name));
  }
  return absl::OkStatus();
}

absl::Status FindTimeout(InferredInputs* inputs) {
  TF_RETURN_IF_ERROR(inputs->FindScalar("timeout_secs"));
  const tensorflow::Tensor* value = inputs->Constant();
  return value == nullptr ? absl::OkStatus()
                          : CheckTimeout(value->scalar<double>()());
}

absl::Status RoundsShape(InferenceContext* c) {
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

absl::Status PushShape(InferenceContext* c) {
  InferredInputs inputs(c);
  c->set_output(0, c->Scalar());
  return FindScalars(&inputs, {"rounds", "worker", "round"});
}

absl::Status GatherShape(InferenceContext* c) {
  InferredInputs inputs(c);
  c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
  TF_RETURN_IF_ERROR(FindScalars(&inputs, {"rounds", "round", "min_workers"}));
  return FindTimeout(&inputs);
}

template <bool kRef>
absl::Status MeanShape(InferenceContext* c) {
  InferredInputs inputs(c, kRef);
  TF_RETURN_IF_ERROR(FindScalars(&inputs, {"rounds", "round"}));
  tensorflow::PartialTensorShape workers;
  TF_RETURN_IF_ERROR(inputs.FindTensor("workers", &workers));
  TF_RETURN_IF_ERROR(CheckWorkers(workers));
  int n, centers;
  tensorflow::DataType dtype;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
  TF_RETURN_IF_ERROR(c->GetAttr("T", &dtype));
  TF_RETURN_IF_ERROR(inputs.FindVariables("centers", "T", &centers));
  int64_t elements;
  return inputs.CountElements(centers, n, dtype, &elements);
}

absl::Status NextShape(InferenceContext* c) {
  InferredInputs inputs(c);
  c->set_output(0, c->Scalar());
  return FindScalars(&inputs, {"rounds", "round"});
}

absl::Status WaitShape(InferenceContext* c) {
  InferredInputs inputs(c);
  c->set_output(0, c->Scalar());
  TF_RETURN_IF_ERROR(FindScalars(&inputs, {"rounds", "round"}));
  return FindTimeout(&inputs);
}

constexpr char kMeanDoc[] = R"doc(
Assigns the mean of workers' values to variables.

A value is a vector of the elements of all N centers, in the order of the
centers, each in row-major order. The op assigns the mean of the workers' values
to the centers in one pass over memory: each value is read once, each center
written once. The mean is computed in float (in double for double) as a running
mean

    mean_k = mean_{k-1} + (value_k - mean_{k-1}) / k

so that the mean of equal values is exact, and the mean of large half values
does not overflow. The order is that of `workers`.

All inputs are checked before any center is changed. The round keeps the values.

rounds: From Wrapopt>AveragingRounds.
round: The open round.
workers: [M], M >= 1 different names of workers that pushed to the round.
centers: N variables, all different.
T: dtype of the centers and the values.
value: The index of the value among those that each worker pushed.
)doc";

}  // namespace

REGISTER_OP("Wrapopt>AveragingRounds")
    .Output("rounds: resource")
    .Attr("num_workers: int >= 1")
    .Attr("settings: string = ''")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(RoundsShape)
    .Doc(R"doc(
The averaging rounds of a group of workers, on one device.

Rounds are numbered, and one round is open. At first it is round -1, which is
like any other round; workers may wait for its end, when the chief opens round
0. Each worker pushes its values to the open round. One of the workers, the
chief, gathers the workers that pushed, takes means of their values, and opens
the next round. The other workers wait for that.

If the variables to average are on several devices, each device has rounds for
its values. The rounds of one device lead: workers are gathered and wait there.
On the other devices, a push to a later round opens that round.

A round holds at most num_workers sets of values. Only the open round has any.

rounds: A handle. It must not leave the device.
num_workers: The number of workers. It must be the same in all ops that share
  the rounds.
settings: If non-empty, the rounds are served: they have a center, servers end
  them, and the workers use Wrapopt>AveragingEnter and the ops after it instead
  of those of a chief. The text tells how; it must be the same in all ops that
  share the rounds.
container: If non-empty, the container that holds the rounds.
shared_name: Ops with the same name on the same device share the rounds, in all
  graphs, sessions and processes. If empty, the rounds are not shared.
)doc");

REGISTER_OP("Wrapopt>AveragingPush")
    .Input("rounds: resource")
    .Input("worker: string")
    .Input("round: int64")
    .Input("values: T")
    .Output("accepted: bool")
    .Attr("T: list(" WRAPOPT_NUMBER_TYPES ") >= 0")
    .SetIsStateful()
    .SetShapeFn(PushShape)
    .Doc(R"doc(
Adds a worker's values to a round.

The values replace those that the worker pushed to the same round before. They
are dropped if the round is over or has been gathered already. A push to a later
round than the open one ends the open round and opens the later one: this
advances the rounds of devices that do not lead.

The worker counts as alive for Wrapopt>AveragingGather, even if its values are
not accepted.

rounds: From Wrapopt>AveragingRounds.
worker: A scalar, the worker's name. At most num_workers different workers may
  push to a round.
round: A scalar.
values: Any number of tensors. A tensor whose buffer has no other owner is not
  copied.
accepted: Whether the values are part of the round.
)doc");

REGISTER_OP("Wrapopt>AveragingGather")
    .Input("rounds: resource")
    .Input("round: int64")
    .Input("min_workers: int64")
    .Input("timeout_secs: double")
    .Output("workers: string")
    .SetIsStateful()
    .SetShapeFn(GatherShape)
    .Doc(R"doc(
Waits for the workers of the open round, and closes it for further values.

The op waits until all expected workers have pushed, at least min_workers. After
timeout_secs, it closes the round with the workers that have pushed, if they are
at least min_workers. Otherwise it fails.

At first all num_workers workers are expected. After a round that its deadline
has closed, the expected workers are those of that round and all that have
pushed or waited since, even if too late. So the rounds wait for a dead worker
once, and again after it has returned. After a round of all num_workers, and
after a reset, all are expected again.

A second gather of a round returns the same workers, even if they are fewer than
its own min_workers. The op fails if another round is open, or is opened during
the wait.

rounds: From Wrapopt>AveragingRounds.
round: A scalar, the open round.
min_workers: A scalar in [1, num_workers].
timeout_secs: A scalar greater than 0; infinity for no deadline.
workers: [M] names of the workers of the round, sorted;
  min_workers <= M <= num_workers in the first gather of the round.
)doc");

REGISTER_OP("Wrapopt>AveragingMean")
    .Input("rounds: resource")
    .Input("round: int64")
    .Input("workers: string")
    .Input("centers: N * resource")
    .Attr("T: " WRAPOPT_NUMBER_TYPES)
    .Attr("N: int >= 1")
    .Attr("value: int >= 0 = 0")
    .SetIsStateful()
    .SetShapeFn(MeanShape<false>)
    .Doc(kMeanDoc);

// For the ref variables of TensorFlow 1 graphs.
REGISTER_OP("Wrapopt>AveragingMeanRef")
    .Input("rounds: resource")
    .Input("round: int64")
    .Input("workers: string")
    .Input("centers: Ref(N * T)")
    .Attr("T: " WRAPOPT_NUMBER_TYPES)
    .Attr("N: int >= 1")
    .Attr("value: int >= 0 = 0")
    .SetIsStateful()
    .SetShapeFn(MeanShape<true>)
    .Doc(kMeanDoc);

REGISTER_OP("Wrapopt>AveragingNext")
    .Input("rounds: resource")
    .Input("round: int64")
    .Output("open: int64")
    .Attr("reset: bool = false")
    .SetIsStateful()
    .SetShapeFn(NextShape)
    .Doc(R"doc(
Ends a round and opens the next one.

The op drops the values, and ends all waits for the end of the round. It fails
if the round is already over. Rounds whose open round is an earlier one, on a
device that does not lead and got no values, skip to round + 1.

rounds: From Wrapopt>AveragingRounds.
round: A scalar, the round that ends.
open: The number of the open round after this op: round + 1.
reset: For a chief that starts or restarts: ends the open round, whatever its
  number, ignores `round`, and expects all num_workers again.
)doc");

REGISTER_OP("Wrapopt>AveragingWait")
    .Input("rounds: resource")
    .Input("round: int64")
    .Input("timeout_secs: double")
    .Output("open: int64")
    .Attr("worker: string = ''")
    .SetIsStateful()
    .SetShapeFn(WaitShape)
    .Doc(R"doc(
Waits while a round is the open one.

rounds: From Wrapopt>AveragingRounds.
round: A scalar; -1 waits for a chief to open the rounds.
timeout_secs: A scalar greater than 0; infinity for no deadline. After that, the
  op fails.
open: The number of the open round after the wait.
worker: The name of the waiting worker, which a gather expects from now on. ""
  for none.
)doc");

}  // namespace wrapopt
