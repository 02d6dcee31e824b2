#include "absl/status/status.h"
#include "cc/ops/contracts.h"
#include "cc/ops/inferred_inputs.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def_builder.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace wrapopt {
namespace {

using tensorflow::shape_inference::InferenceContext;

template <bool kRef>
absl::Status RecordShape(InferenceContext* c) {
  InferredInputs inputs(c, kRef);
  int step;
  TF_RETURN_IF_ERROR(inputs.FindVariables("step", "T", &step));
  c->set_output(0, c->Scalar());
  c->set_output(1, c->Scalar());
  return CheckStep(inputs, step);
}

template <bool kRef>
absl::Status GateShape(InferenceContext* c) {
  InferredInputs inputs(c, kRef);
  int step, counter, histogram;
  TF_RETURN_IF_ERROR(inputs.FindVariables("step", "T", &step));
  TF_RETURN_IF_ERROR(inputs.FindVariables("stale_counter", nullptr, &counter));
  TF_RETURN_IF_ERROR(inputs.FindVariables("histogram", nullptr, &histogram));
  TF_RETURN_IF_ERROR(inputs.FindScalar("recorded"));
  TF_RETURN_IF_ERROR(inputs.FindScalar("limit"));
  for (int i = 0; i < 3; ++i) c->set_output(i, c->Scalar());
  return CheckGate(inputs, step, counter, histogram);
}

template <bool kRef>
absl::Status CompleteShape(InferenceContext* c) {
  InferredInputs inputs(c, kRef);
  TF_RETURN_IF_ERROR(inputs.FindScalar("ticket"));
  int step;
  TF_RETURN_IF_ERROR(inputs.FindVariables("step", "T", &step));
  return CheckStep(inputs, step);
}

constexpr char kRecordDoc[] = R"doc(
Records the step, before a worker reads the weights.

step: A scalar variable, int32 or int64: the number of completed updates.
recorded: For Wrapopt>StalenessGate: the step, plus the number of aborted
  updates, which may have changed weights.
in_flight: The number of updates that are admitted and not complete. Weights
  that are read now may miss all or a part of these.
)doc";

constexpr char kGateDoc[] = R"doc(
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
  step was set back.
recorded: A scalar, from Wrapopt>StalenessRecord.
limit: A scalar.
accept: Whether the update is admitted.
staleness: The staleness of the update.
ticket: Owns the admission. It must not leave the device.
)doc";

constexpr char kCompleteDoc[] = R"doc(
Ends an update that Wrapopt>StalenessGate admitted.

Run it after all changes of the update. For an update that was not admitted, it
does nothing.

ticket: From Wrapopt>StalenessGate.
step: The step variable of that gate.
increment: Whether to increment the step, atomically with the completion. If
  false, another op must increment it, after the update and before this op.
)doc";

}  // namespace

// Each op has a version for the ref variables of TensorFlow 1 graphs.

REGISTER_OP("Wrapopt>StalenessRecord")
    .Input("step: resource")
    .Output("recorded: int64")
    .Output("in_flight: int64")
    .SetIsStateful()
    .SetShapeFn(RecordShape<false>)
    .Doc(kRecordDoc);

REGISTER_OP("Wrapopt>StalenessRecordRef")
    .Input("step: Ref(T)")
    .Output("recorded: int64")
    .Output("in_flight: int64")
    .Attr("T: {int32, int64}")
    .SetIsStateful()
    .SetShapeFn(RecordShape<true>)
    .Doc(kRecordDoc);

REGISTER_OP("Wrapopt>StalenessGate")
    .Input("step: resource")
    .Input("stale_counter: resource")
    .Input("histogram: resource")
    .Input("recorded: int64")
    .Input("limit: int64")
    .Output("accept: bool")
    .Output("staleness: int64")
    .Output("ticket: resource")
    .SetIsStateful()
    .SetShapeFn(GateShape<false>)
    .Doc(kGateDoc);

REGISTER_OP("Wrapopt>StalenessGateRef")
    .Input("step: Ref(T)")
    .Input("stale_counter: Ref(float)")
    .Input("histogram: Ref(int64)")
    .Input("recorded: int64")
    .Input("limit: int64")
    .Output("accept: bool")
    .Output("staleness: int64")
    .Output("ticket: resource")
    .Attr("T: {int32, int64}")
    .SetIsStateful()
    .SetShapeFn(GateShape<true>)
    .Doc(kGateDoc);

REGISTER_OP("Wrapopt>StalenessComplete")
    .Input("ticket: resource")
    .Input("step: resource")
    .Attr("increment: bool = true")
    .SetIsStateful()
    .SetShapeFn(CompleteShape<false>)
    .Doc(kCompleteDoc);

REGISTER_OP("Wrapopt>StalenessCompleteRef")
    .Input("ticket: resource")
    .Input("step: Ref(T)")
    .Attr("T: {int32, int64}")
    .Attr("increment: bool = true")
    .SetIsStateful()
    .SetShapeFn(CompleteShape<true>)
    .Doc(kCompleteDoc);

}  // namespace wrapopt
