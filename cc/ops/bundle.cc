#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace wrapopt {
namespace {

using tensorflow::shape_inference::InferenceContext;

absl::Status BundleShape(InferenceContext* c) {
  c->set_output(0, c->Vector(c->num_inputs()));
  return absl::OkStatus();
}

absl::Status BundleByNameShape(InferenceContext* c) {
  std::vector<std::string> names;
  TF_RETURN_IF_ERROR(c->GetAttr("shared_names", &names));
  c->set_output(0, c->Vector(names.size()));
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("Wrapopt>Bundle")
    .Input("variables: N * resource")
    .Output("handles: resource")
    .Attr("N: int >= 1")
    .SetShapeFn(BundleShape)
    .Doc(R"doc(
Packs the handles of variables into one tensor, which Apply and EmaUpdate take
as their variables.

A function that captures this tensor has one capture instead of N. Each capture
costs time in every call.

variables: N variables on the op's device.
handles: [N] handles of the variables.
)doc");

REGISTER_OP("Wrapopt>BundleByName")
    .Output("handles: resource")
    .Attr("containers: list(string)")
    .Attr("shared_names: list(string)")
    .Attr("dtypes: list(type)")
    .Attr("shapes: list(shape)")
    .SetIsStateful()
    .SetShapeFn(BundleByNameShape)
    .Doc(R"doc(
Packs the handles of variables with these names, on the op's device.

A session that runs this op runs no VarHandleOp for each variable.

handles: [N] handles of the variables.
containers: N containers, as in VarHandleOp.
shared_names: N names, as in VarHandleOp, none of them empty.
dtypes: N dtypes, as in VarHandleOp.
shapes: N shapes, as in VarHandleOp.
)doc");

}  // namespace wrapopt
