#include <string>

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

absl::Status CheckScalar(InferenceContext* c, ShapeHandle shape,
                         const std::string& subject) {
  ShapeHandle scalar;
  if (c->WithRank(shape, 0, &scalar).ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(subject, " misshapen: got ", c->DebugString(shape),
                   " but expected [] (a scalar)"));
}

// The step's dtype is an attribute only where it is a ref variable.
absl::Status CheckStep(InferenceContext* c, int step, bool ref) {
  const tensorflow::DataType dtype =
      ref ? tensorflow::DT_INVALID : VariableDtype(c, step);
  if (dtype != tensorflow::DT_INVALID && dtype != tensorflow::DT_INT32 &&
      dtype != tensorflow::DT_INT64) {
    return absl::InvalidArgumentError(
        absl::StrCat("step must be of dtype int32 or int64, got ",
                     tensorflow::DataTypeString(dtype)));
  }
  return CheckScalar(c, VariableShape(c, step, ref), "step");
}

template <bool kRef>
absl::Status RecordShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckStep(c, 0, kRef));
  c->set_output(0, c->Scalar());
  c->set_output(1, c->Scalar());
  return absl::OkStatus();
}

// Inputs in order: step, stale_counter, histogram, recorded, limit.
template <bool kRef>
absl::Status GateShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckStep(c, 0, kRef));
  if (!kRef) {
    TF_RETURN_IF_ERROR(
        CheckVariableDtype(c, 1, "stale_counter", tensorflow::DT_FLOAT));
    TF_RETURN_IF_ERROR(
        CheckVariableDtype(c, 2, "histogram", tensorflow::DT_INT64));
  }
  TF_RETURN_IF_ERROR(CheckScalar(c, VariableShape(c, 1, kRef),
                                 "stale_counter"));
  const ShapeHandle histogram = VariableShape(c, 2, kRef);
  ShapeHandle merged;
  if (!c->Merge(histogram, c->Matrix(2, c->UnknownDim()), &merged).ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("histogram misshapen: got ", c->DebugString(histogram),
                     " but expected [2, B] with B >= 1 (admitted and dropped, "
                     "in B buckets)"));
  }
  TF_RETURN_IF_ERROR(CheckScalar(c, c->input(3), "recorded"));
  TF_RETURN_IF_ERROR(CheckScalar(c, c->input(4), "limit"));
  for (int i = 0; i < 3; ++i) c->set_output(i, c->Scalar());
  return absl::OkStatus();
}

// Inputs in order: ticket, step.
template <bool kRef>
absl::Status CompleteShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckScalar(c, c->input(0), "ticket"));
  return CheckStep(c, 1, kRef);
}

constexpr char kRecordDoc[] = R"doc(
Records the step, before a worker reads the weights.

step: A scalar variable, int32 or int64: the number of completed updates.
recorded: For Wrapopt>StalenessGate: the step, plus the number of updates that
  were aborted, which may have changed weights.
in_flight: How many updates were admitted and are not yet complete. The weights
  that are read now may lack any part of these.
)doc";

constexpr char kGateDoc[] = R"doc(
Admits an update if the weights that it was computed from are fresh enough.

The staleness of an update is the number of updates that its weights may lack:
those that were in flight when its worker recorded the step, and those that
were admitted since. It is admitted where

    0 <= limit and staleness <= limit

which is decided atomically with the counting, whatever the number of workers.
It is then in flight until its ticket is completed by Wrapopt>StalenessComplete,
or is destroyed because the step that made it has ended, by an error or by the
end of the worker that ran it.

step: A scalar variable, int32 or int64: the number of completed updates. It is
  only read.
stale_counter: A scalar float variable: the number of dropped updates.
histogram: An int64 variable of shape [2, B]: how many updates of which
  staleness were admitted ([0, :]) and dropped ([1, :]). The last bucket also
  has all that are staler, the first those below 0: of a step that was set back.
recorded: A scalar, from Wrapopt>StalenessRecord.
limit: A scalar.
accept: Whether the update is admitted.
staleness: What was compared with the limit.
ticket: Owns the admission. It must not leave the device.
)doc";

constexpr char kCompleteDoc[] = R"doc(
Ends an update that Wrapopt>StalenessGate admitted.

Run it after all changes of the update. For an update that was not admitted, it
does nothing.

ticket: From Wrapopt>StalenessGate.
step: The step variable of that gate.
increment: Whether to increment the step, atomically with the completion. If
  not, somebody else does, after the changes of the update and before this.
)doc";

}  // namespace

// Each has a sibling for the ref variables of TensorFlow 1 graphs.

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
