#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/ops/apply_op.h"
#include "cc/ops/contracts.h"
#include "cc/ops/inferred_inputs.h"
#include "cc/ops/number_types.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace wrapopt {
namespace {

using tensorflow::PartialTensorShape;
using tensorflow::shape_inference::InferenceContext;

absl::Status HandlePackShape(InferenceContext* c) {
  c->set_output(0, c->Vector(c->num_inputs()));
  return absl::OkStatus();
}

absl::Status NamedPackShape(InferenceContext* c) {
  std::vector<std::string> names;
  TF_RETURN_IF_ERROR(c->GetAttr("shared_names", &names));
  c->set_output(0, c->Vector(names.size()));
  return absl::OkStatus();
}

// `lists` is the number of lists of N handles beside the shadows. Dtypes and
// shapes of the variables are known when the op runs.
absl::Status FindHandles(InferredInputs* inputs, const ShadowContract& averages,
                         int lists) {
  PartialTensorShape handles;
  TF_RETURN_IF_ERROR(inputs->FindTensor("handles", &handles));
  const int64_t count = averages.values() * (lists + averages.per_value());
  return CheckShape("handles", handles, PartialTensorShape({count}),
                    "one for each variable");
}

absl::Status PackedEmaUpdateShape(InferenceContext* c) {
  ShadowContract averages;
  TF_RETURN_IF_ERROR(averages.Init(c));
  InferredInputs inputs(c);
  TF_RETURN_IF_ERROR(FindHandles(&inputs, averages, /*lists=*/1));
  return inputs.FindDecays(averages);
}

absl::Status PackedApplyShape(InferenceContext* c) {
  std::string name;
  const RuleInfo* rule;
  TF_RETURN_IF_ERROR(c->GetAttr("rule", &name));
  TF_RETURN_IF_ERROR(FindUpdate(name, &rule));
  ApplyContract contract;
  ShadowContract averages;
  TF_RETURN_IF_ERROR(
      contract.Init(c, *rule, ApplyContract::Scalars::kVector));
  TF_RETURN_IF_ERROR(averages.Init(c));
  InferredInputs inputs(c);
  TF_RETURN_IF_ERROR(FindHandles(&inputs, averages, contract.states().size()));
  std::vector<PartialTensorShape> grads;
  TF_RETURN_IF_ERROR(inputs.FindTensors("grad", &grads));
  PartialTensorShape scalars;
  TF_RETURN_IF_ERROR(inputs.FindTensor("scalars", &scalars));
  TF_RETURN_IF_ERROR(contract.CheckScalars(scalars));
  TF_RETURN_IF_ERROR(inputs.FindDecays(averages));
  return inputs.FindScalar("accept");
}

}  // namespace

REGISTER_OP("Wrapopt>Bundle")
    .Input("variables: N * resource")
    .Output("handles: resource")
    .Attr("N: int >= 1")
    .SetShapeFn(HandlePackShape)
    .Doc(R"doc(
Packs the handles of variables into one tensor.

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
    .SetShapeFn(NamedPackShape)
    .Doc(R"doc(
Makes a handle pack of variables with names, on the op's device.

A session that runs this op runs no VarHandleOp for each variable.

handles: [N] handles of the variables.
containers: N containers, as in VarHandleOp.
shared_names: N names, as in VarHandleOp, none of them empty.
dtypes: N dtypes, as in VarHandleOp.
shapes: N shapes, as in VarHandleOp.
)doc");

REGISTER_OP("Wrapopt>ApplyBundle")
    .Input("handles: resource")
    .Input("grad: N * G")
    .Input("scalars: double")
    .Input("decays: double")
    .Input("accept: bool")
    .Attr("rule: string")
    .Attr("N: int >= 1")
    .Attr("NK: int >= 0")
    .Attr("T: " WRAPOPT_NUMBER_TYPES)
    .Attr("G: " WRAPOPT_NUMBER_TYPES)
    .Attr("S: " WRAPOPT_NUMBER_TYPES " = DT_FLOAT")
    .Attr("use_locking: bool = true")
    .SetIsStateful()
    .SetShapeFn(PackedApplyShape)
    .Doc(R"doc(
Wrapopt>Apply<Rule> for variables in a handle pack.

handles: From Wrapopt>Bundle or BundleByName: the rule's states, N of each, in
  the order of the inputs of Wrapopt>Apply<Rule>; then the N * K shadows.
grad: N gradients, each of the shape of its variable.
scalars: The rule's scalars, in the order of cc/rules/rules.h. A bool is 0 or 1.
decays: [K], as in Wrapopt>Apply<Rule>.
accept: A scalar. If false, nothing changes, and the op returns at once.
rule: The name of an update rule, such as Adam.
NK: N * K.
T: dtype of the variables and their slots.
G: dtype of the gradients: T, or float if T is half or bfloat16.
S: dtype of the shadows: T, or float if T is half or bfloat16.
use_locking: Whether the variables are locked against other updates.
)doc");

REGISTER_OP("Wrapopt>EmaUpdateBundle")
    .Input("handles: resource")
    .Input("decays: double")
    .Attr("N: int >= 1")
    .Attr("NK: int >= 1")
    .Attr("T: " WRAPOPT_NUMBER_TYPES)
    .Attr("S: " WRAPOPT_NUMBER_TYPES)
    .SetIsStateful()
    .SetShapeFn(PackedEmaUpdateShape)
    .Doc(R"doc(
Wrapopt>EmaUpdate for variables in a handle pack.

handles: From Wrapopt>Bundle or BundleByName: the N * K shadows, then the N
  values.
decays: [K], as in Wrapopt>EmaUpdate.
NK: N * K.
T: dtype of the values.
S: dtype of the shadows: T, or float if T is half or bfloat16.
)doc");

}  // namespace wrapopt
