// The ops of the lock of steps.
#include "absl/status/status.h"
#include "cc/ops/inferred_inputs.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace wrapopt {
namespace {

using tensorflow::shape_inference::InferenceContext;

absl::Status LockShape(InferenceContext* c) {
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

absl::Status UnlockShape(InferenceContext* c) {
  return InferredInputs(c).FindScalar("lock");
}

}  // namespace

REGISTER_OP("Wrapopt>LockSteps")
    .Input("variable: resource")
    .Output("lock: resource")
    .Attr("of: string = ''")
    .SetIsStateful()
    .SetShapeFn(LockShape)
    .Doc(R"doc(
Waits for the lock of a variable, which one step at a time holds.

Those who wait get it in the order in which they came, and hold no thread. The
lock ends with Wrapopt>UnlockSteps, or when its tensor is destroyed: at the end
of its step on this device, also if that ends with an error or its worker dies.
One who waits ends with its step, and does not disturb the others.

variable: A variable on this device. Its value is not used.
of: Which lock of the variable: it has one for each string.
lock: Owns the lock. It must not leave the device.
)doc");

REGISTER_OP("Wrapopt>UnlockSteps")
    .Input("lock: resource")
    .SetIsStateful()
    .SetShapeFn(UnlockShape)
    .Doc(R"doc(
Gives a lock of Wrapopt>LockSteps to the next one who waits for it.

Run it after all changes of the step.

lock: From Wrapopt>LockSteps.
)doc");

}  // namespace wrapopt
