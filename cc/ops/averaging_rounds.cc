#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/ops/handle_shapes.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def_builder.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status CheckScalar(InferenceContext* c, const char* name) {
  std::vector<ShapeHandle> shape;
  TF_RETURN_IF_ERROR(c->input(name, &shape));
  ShapeHandle scalar;
  if (c->WithRank(shape[0], 0, &scalar).ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " misshapen: got ", c->DebugString(shape[0]),
                   " but expected [] (a scalar)"));
}

absl::Status RoundsShape(InferenceContext* c) {
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

absl::Status PushShape(InferenceContext* c) {
  for (const char* name : {"rounds", "worker", "round"}) {
    TF_RETURN_IF_ERROR(CheckScalar(c, name));
  }
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

absl::Status GatherShape(InferenceContext* c) {
  for (const char* name : {"rounds", "round", "min_workers", "timeout_secs"}) {
    TF_RETURN_IF_ERROR(CheckScalar(c, name));
  }
  c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
  return absl::OkStatus();
}

// Inputs in order: rounds, round, workers, centers.
template <bool kRef>
absl::Status MeanShape(InferenceContext* c) {
  for (const char* name : {"rounds", "round"}) {
    TF_RETURN_IF_ERROR(CheckScalar(c, name));
  }
  constexpr int kWorkers = 2, kCenters = 3;
  ShapeHandle vector;
  if (!c->WithRank(c->input(kWorkers), 1, &vector).ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "workers misshapen: got ", c->DebugString(c->input(kWorkers)),
        " but expected [M] (names of workers)"));
  }
  if (kRef) return absl::OkStatus();
  tensorflow::DataType dtype;
  TF_RETURN_IF_ERROR(c->GetAttr("T", &dtype));
  for (int i = kCenters; i < c->num_inputs(); ++i) {
    TF_RETURN_IF_ERROR(CheckVariableDtype(
        c, i, absl::StrCat("centers[", i - kCenters, "]"), dtype));
  }
  return absl::OkStatus();
}

absl::Status NextShape(InferenceContext* c) {
  for (const char* name : {"rounds", "round"}) {
    TF_RETURN_IF_ERROR(CheckScalar(c, name));
  }
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

absl::Status WaitShape(InferenceContext* c) {
  for (const char* name : {"rounds", "round", "timeout_secs"}) {
    TF_RETURN_IF_ERROR(CheckScalar(c, name));
  }
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

constexpr char kMeanDoc[] = R"doc(
Assigns the mean of workers' values to variables.

A value of the open round is a vector that holds the elements of all N centers
one after another, each in row-major order. Their mean over the workers goes
into the centers in one pass over memory: each value is read once, each center
written once. It is computed in float (in double for double) as a running mean

    mean_k = mean_{k-1} + (value_k - mean_{k-1}) / k

so that the mean of values that are all the same is exactly that, and the mean
of large half values does not overflow. The order is that of `workers`.

All is checked before any center is changed. The values stay where they are.

rounds: From Wrapopt>AveragingRounds.
round: The open round.
workers: [M], M >= 1 names of workers that pushed to the round, each once.
centers: N variables, all different.
T: dtype of the centers and the values.
value: Which of the values of each worker.
)doc";

}  // namespace

REGISTER_OP("Wrapopt>AveragingRounds")
    .Output("rounds: resource")
    .Attr("num_workers: int >= 1")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(RoundsShape)
    .Doc(R"doc(
The rounds of averaging that a group of workers makes, on one device.

Rounds are numbered, and one of them is open. At first that is -1, a round like
others for workers that do not wait until their chief opens round 0. Workers
push the values that they have to the open round, one of them, the chief,
gathers those who came, takes means of their values, and opens the next round,
for which the others wait.

Where the variables to average are on several devices, each device has rounds
of its own for its values. Those of one device lead: workers are gathered and
waited for there. The others' follow, for they open the round that is pushed to.

At most num_workers sets of values are held, those of the open round.

rounds: A handle. It must not leave the device.
num_workers: How many workers there are. All who share the rounds say the same.
container: If non-empty, the container that holds the rounds.
shared_name: Who gives the same name on the same device, from whatever graph,
  session or process, shares the rounds. If empty, nobody does.
)doc");

REGISTER_OP("Wrapopt>AveragingPush")
    .Input("rounds: resource")
    .Input("worker: string")
    .Input("round: int64")
    .Input("values: T")
    .Output("accepted: bool")
    .Attr("T: list({half, bfloat16, float, double}) >= 0")
    .SetIsStateful()
    .SetShapeFn(PushShape)
    .Doc(R"doc(
Leaves a worker's values with a round.

The values replace those that the worker left with the same round. They are
refused, and dropped, where the round is over, or has been gathered already, or
is below 0. A round that is yet to come is opened by its first values, which
ends the one that was open: this is how the rounds of devices that do not lead
go on.

Accepted or not, the worker counts as alive for Wrapopt>AveragingGather.

rounds: From Wrapopt>AveragingRounds.
worker: A scalar, the worker's name. At most num_workers different ones may
  push to a round.
round: A scalar.
values: Any number of tensors. One whose buffer nobody else holds is kept
  without a copy.
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
Waits for the workers of the open round, and accepts no more values then.

It waits until all num_workers have pushed, but where min_workers is less than
that, only until min_workers have pushed, and with them all who are expected;
and when timeout_secs have passed, it takes those who came, if they are
min_workers, or fails.

Expected are all, until a round is made of those who came in time: from then on,
these and all who have pushed since, be it too late. So a worker that is dead is
waited for once, and again when it is back. When all num_workers have come, or
after a reset, all are expected again.

To gather a round again gives the same workers. It fails where another round is
open, or is opened meanwhile.

rounds: From Wrapopt>AveragingRounds.
round: A scalar, the open round.
min_workers: A scalar in [1, num_workers].
timeout_secs: A scalar greater than 0; infinity for no deadline.
workers: [M] names of those whose values make up the round, sorted;
  min_workers <= M <= num_workers.
)doc");

REGISTER_OP("Wrapopt>AveragingMean")
    .Input("rounds: resource")
    .Input("round: int64")
    .Input("workers: string")
    .Input("centers: N * resource")
    .Attr("T: {half, bfloat16, float, double}")
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
    .Attr("T: {half, bfloat16, float, double}")
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

The values are dropped, and all who wait for the end of a round are answered. It
fails where the round is over already. Rounds that have not come that far, those
of a device that does not lead and got no values, move on.

rounds: From Wrapopt>AveragingRounds.
round: A scalar, the round that ends.
open: The number of the one that is open now: round + 1.
reset: For a chief that begins, or begins again: ends whatever round is open,
  ignores `round`, and all num_workers are expected again.
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
Waits for the end of a round: while this round is the open one.

rounds: From Wrapopt>AveragingRounds.
round: A scalar; -1 waits for a chief to open the rounds.
timeout_secs: A scalar greater than 0; infinity for no deadline. It fails when
  they have passed.
open: The number of the round that is open then.
worker: Who waits: from now on a gather expects this worker. "" for nobody.
)doc");

}  // namespace wrapopt
