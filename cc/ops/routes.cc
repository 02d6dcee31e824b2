#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def_builder.h"
#include "tensorflow/core/framework/partial_tensor_shape.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace wrapopt {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status CheckRoute(InferenceContext* c) {
  std::vector<ShapeHandle> route;
  TF_RETURN_IF_ERROR(c->input("route", &route));
  ShapeHandle scalar;
  if (c->WithRank(route[0], 0, &scalar).ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("route misshapen: got ", c->DebugString(route[0]),
                   " but expected [] (a scalar)"));
}

absl::Status RouteShape(InferenceContext* c) {
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

absl::Status RouteBackShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckRoute(c));
  return RouteShape(c);
}

absl::Status ReceiveShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckRoute(c));
  tensorflow::PartialTensorShape shape;
  TF_RETURN_IF_ERROR(c->GetAttr("shape", &shape));
  ShapeHandle output;
  TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(shape, &output));
  c->set_output(0, output);
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("Wrapopt>Route")
    .Output("route: string")
    .Attr("to: string")
    .SetIsStateful()
    .SetShapeFn(RouteShape)
    .Doc(R"doc(
A way for tensors from the op's device to another one, for this step.

An edge of a graph between two tasks costs a call in each step, also where
nothing crosses: in the branch of a conditional that is not taken, the receiver
asks for each tensor, to be told that there is none. Of all tensors that cross by
Wrapopt>Send and Wrapopt>Receive, only the route itself is such an edge.

route: A scalar, for both ends.
to: The device at the other end, or what is to be known of its name: the task is
  this op's where there is none, and the device the first CPU.
)doc");

REGISTER_OP("Wrapopt>RouteBack")
    .Input("route: string")
    .Output("back: string")
    .SetIsStateful()
    .SetShapeFn(RouteBackShape)
    .Doc(R"doc(
The way back from the far end of a route.

route: From Wrapopt>Route, of which this is the device at the other end.
back: A route from here to where that one begins.
)doc");

REGISTER_OP("Wrapopt>Send")
    .Input("route: string")
    .Input("value: T")
    .Attr("T: type")
    .Attr("channel: string")
    .SetIsStateful()
    .SetShapeFn(CheckRoute)
    .Doc(R"doc(
Sends a tensor along a route. It does not wait for who receives it.

route: From the op's device.
value: Any tensor.
channel: A name, unlike others that are in use on this route in the step.
)doc");

REGISTER_OP("Wrapopt>Receive")
    .Input("route: string")
    .Output("value: T")
    .Attr("T: type")
    .Attr("channel: string")
    .Attr("shape: shape = { unknown_rank: true }")
    .SetIsStateful()
    .SetShapeFn(ReceiveShape)
    .Doc(R"doc(
Receives the tensor of a Wrapopt>Send of the same step.

It waits for that without a thread, and until the step has ended.

route: To the op's device.
value: The tensor.
channel: As the sender has it.
T: dtype of the tensor; another one is refused.
shape: Its shape, as far as that is known; another one is refused.
)doc");

}  // namespace wrapopt
