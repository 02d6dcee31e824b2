#include "cc/ops/staleness_gate.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/ops/inferred_inputs.h"
#include "cc/ops/registration.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/errors.h"

namespace wrapopt {

using tensorflow::DataType;
using tensorflow::DataTypeString;
using tensorflow::PartialTensorShape;
using tensorflow::shape_inference::InferenceContext;

absl::Status CheckStep(const CheckedVariables& variables, int step) {
  const DataType dtype = variables.known_dtype(step);
  if (dtype != tensorflow::DT_INVALID &&
      dtype != tensorflow::DT_INT32 && dtype != tensorflow::DT_INT64) {
    return absl::InvalidArgumentError(
        absl::StrCat(variables.Describe(step), " must be of dtype int32 or ",
                     "int64, got ", DataTypeString(dtype)));
  }
  return variables.CheckShape(step, PartialTensorShape({}), "a scalar");
}

absl::Status CheckGate(const CheckedVariables& variables, int step, int counter,
                       int histogram) {
  TF_RETURN_IF_ERROR(CheckStep(variables, step));
  TF_RETURN_IF_ERROR(variables.CheckDtype(counter, tensorflow::DT_FLOAT));
  TF_RETURN_IF_ERROR(
      variables.CheckShape(counter, PartialTensorShape({}), "a scalar"));
  TF_RETURN_IF_ERROR(variables.CheckDtype(histogram, tensorflow::DT_INT64));
  const PartialTensorShape& shape = variables.known_shape(histogram);
  if (shape.IsCompatibleWith(PartialTensorShape({2, -1})) &&
      (shape.unknown_rank() || shape.dim_size(1) != 0)) {
    return absl::OkStatus();
  }
  return Misshapen(variables.Describe(histogram), shape, "[2, B] with B >= 1",
                   "admitted and dropped, in B buckets");
}

namespace {

absl::Status RecordShape(InferenceContext* c, bool ref) {
  InferredInputs inputs(c, ref);
  int step;
  TF_RETURN_IF_ERROR(inputs.FindVariables("step", "T", &step));
  c->set_output(0, c->Scalar());
  c->set_output(1, c->Scalar());
  return CheckStep(inputs, step);
}

absl::Status GateShape(InferenceContext* c, bool ref) {
  InferredInputs inputs(c, ref);
  int step, counter, histogram;
  TF_RETURN_IF_ERROR(inputs.FindVariables("step", "T", &step));
  TF_RETURN_IF_ERROR(inputs.FindVariables("stale_counter", nullptr, &counter));
  TF_RETURN_IF_ERROR(inputs.FindVariables("histogram", nullptr, &histogram));
  TF_RETURN_IF_ERROR(inputs.FindScalar("recorded"));
  TF_RETURN_IF_ERROR(inputs.FindScalar("limit"));
  TF_RETURN_IF_ERROR(inputs.FindScalar("token"));
  for (int i = 0; i < 4; ++i) c->set_output(i, c->Scalar());
  return CheckGate(inputs, step, counter, histogram);
}

absl::Status BeginShape(InferenceContext* c, bool ref) {
  InferredInputs inputs(c, ref);
  int step;
  TF_RETURN_IF_ERROR(inputs.FindVariables("step", "T", &step));
  TF_RETURN_IF_ERROR(inputs.FindScalar("token"));
  for (int i = 0; i < 3; ++i) c->set_output(i, c->Scalar());
  return CheckStep(inputs, step);
}

absl::Status CompleteShape(InferenceContext* c, bool ref) {
  InferredInputs inputs(c, ref);
  TF_RETURN_IF_ERROR(inputs.FindScalar("ticket"));
  int step;
  TF_RETURN_IF_ERROR(inputs.FindVariables("step", "T", &step));
  return CheckStep(inputs, step);
}

}  // namespace

const bool record_defined = RegisterWithRef(
    "Wrapopt>StalenessRecord", RecordShape, [](auto& op, bool ref) {
      op.Input(ref ? "step: Ref(T)" : "step: resource");
      op.Output("recorded: int64");
      op.Output("in_flight: int64");
      if (ref) op.Attr("T: {int32, int64}");
      op.Doc(R"doc(
Records the step, before a worker reads the weights.

step: A scalar variable, int32 or int64: the number of completed updates.
recorded: For Wrapopt>StalenessGate: the step, plus the number of aborted
  updates, which may have changed weights.
in_flight: The number of updates that are admitted and not complete. Weights
  that are read now may miss all or a part of these.
)doc");
    });

const bool gate_defined = RegisterWithRef(
    "Wrapopt>StalenessGate", GateShape, [](auto& op, bool ref) {
      op.Input(ref ? "step: Ref(T)" : "step: resource");
      op.Input(ref ? "stale_counter: Ref(float)" : "stale_counter: resource");
      op.Input(ref ? "histogram: Ref(int64)" : "histogram: resource");
      op.Input("recorded: int64");
      op.Input("limit: int64");
      op.Input("token: int64");
      op.Output("accept: bool");
      op.Output("staleness: int64");
      op.Output("ticket: resource");
      op.Output("number: int64");
      if (ref) op.Attr("T: {int32, int64}");
      op.Doc(R"doc(
Admits an update if the weights that it was computed from are fresh enough.

The staleness of an update is the number of updates that its weights may miss:
the updates that were in flight when its worker recorded the step, and those
that were admitted since. The update is admitted if

    0 <= limit and staleness <= limit

The op decides and counts atomically, for any number of workers. An admitted
update is in flight until Wrapopt>StalenessComplete completes its ticket, or the
ticket is destroyed. It is destroyed if the session step that made it ends with
an error, or its worker dies.

step: A scalar variable, int32 or int64: the number of completed updates. It is
  only read.
stale_counter: A scalar float variable: the number of dropped updates.
histogram: An int64 variable of shape [2, B]: the numbers of admitted updates
  ([0, :]) and of dropped ones ([1, :]) by staleness. The last bucket also
  counts larger staleness. The first also counts negative staleness, after the
  step was set back. The next call takes an update back that was aborted.
recorded: A scalar, from Wrapopt>StalenessRecord.
limit: A scalar.
token: A scalar: a number that is the same for all tries of an update, and
  different for all others; or -1. If a worker dies after its update is complete
  or refused, and the update is tried again, the op counts nothing and does not
  admit it. If the first try is in flight, the op waits for its end, or for a
  second: then the first try will not be counted.
accept: Whether the update is admitted.
staleness: The staleness of the update; -1 if an earlier try is over.
ticket: Owns the admission. It must not leave the device.
number: The number of the update among all that are admitted, counted from the
  step: the least that no update in flight or complete has, -1 if it is not
  admitted. So N complete updates have N different numbers, also if others were
  aborted, as long as only Wrapopt>StalenessComplete increments the step.
)doc");
    });

const bool begin_defined = RegisterWithRef(
    "Wrapopt>BeginUpdate", BeginShape, [](auto& op, bool ref) {
      op.Input(ref ? "step: Ref(T)" : "step: resource");
      op.Input("token: int64");
      op.Output("accept: bool");
      op.Output("number: int64");
      op.Output("ticket: resource");
      if (ref) op.Attr("T: {int32, int64}");
      op.Doc(R"doc(
Begins an update of asynchronous training, and gives it its number.

As Wrapopt>StalenessGate, without a limit, a record or counters. The update is
in flight until Wrapopt>StalenessComplete completes its ticket.

step: A scalar variable, int32 or int64: the number of completed updates. It is
  only read.
token: As in Wrapopt>StalenessGate.
accept: Whether to take the update: false if an earlier try is over.
number: As in Wrapopt>StalenessGate.
ticket: As there.
)doc");
    });

const bool complete_defined = RegisterWithRef(
    "Wrapopt>StalenessComplete", CompleteShape, [](auto& op, bool ref) {
      op.Input("ticket: resource");
      op.Input(ref ? "step: Ref(T)" : "step: resource");
      if (ref) op.Attr("T: {int32, int64}");
      op.Attr("increment: bool = true");
      op.Doc(R"doc(
Ends an update that Wrapopt>StalenessGate or Wrapopt>BeginUpdate admitted.

Run it after all changes of the update. For an update that was not admitted, it
does nothing.

ticket: From one of these ops.
step: The step variable of that op.
increment: Whether to increment the step, atomically with the completion. If
  false, another op must increment it, after the update and before this op.
  An update is not counted if another try with its token has taken its place.
)doc");
    });

}  // namespace wrapopt
