#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/ops/apply_op.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace wrapopt {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// The input must be a vector of `size` elements.
absl::Status CheckVector(InferenceContext* c, const char* name, int64_t size,
                         const char* of) {
  std::vector<ShapeHandle> input;
  TF_RETURN_IF_ERROR(c->input(name, &input));
  ShapeHandle merged;
  if (c->Merge(input[0], c->Vector(size), &merged).ok()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(name, " misshapen: got ", c->DebugString(input[0]),
                   " but expected [", size, "] (", of, ")"));
}

absl::Status BundleShape(InferenceContext* c) {
  c->set_output(0, c->Vector(c->num_inputs()));
  return absl::OkStatus();
}

// `lists` is the number of lists of N handles, without the shadows. The kernel
// checks the variables.
absl::Status CheckBundle(InferenceContext* c, int64_t lists) {
  int n, nk;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
  TF_RETURN_IF_ERROR(c->GetAttr("NK", &nk));
  TF_RETURN_IF_ERROR(
      CheckVector(c, "handles", lists * n + nk, "one for each variable"));
  return CheckVector(c, "decays", nk / n,
                     "one decay for each shadow of a value");
}

absl::Status ApplyBundleShape(InferenceContext* c) {
  std::string name;
  const RuleInfo* rule;
  TF_RETURN_IF_ERROR(c->GetAttr("rule", &name));
  TF_RETURN_IF_ERROR(FindUpdate(name, &rule));
  TF_RETURN_IF_ERROR(CheckBundle(c, CountNames(rule->states)));
  TF_RETURN_IF_ERROR(
      CheckVector(c, "scalars", CountNames(rule->scalars),
                  "the rule's scalars"));
  std::vector<ShapeHandle> accept;
  TF_RETURN_IF_ERROR(c->input("accept", &accept));
  ShapeHandle scalar;
  if (c->WithRank(accept[0], 0, &scalar).ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("accept misshapen: got ", c->DebugString(accept[0]),
                   " but expected [] (a scalar)"));
}

}  // namespace

REGISTER_OP("Wrapopt>Bundle")
    .Input("variables: N * resource")
    .Output("handles: resource")
    .Attr("N: int >= 1")
    .SetShapeFn(BundleShape)
    .Doc(R"doc(
Packs the handles of variables into one tensor.

A function that captures this tensor has one capture instead of N. Each capture
costs time in every call.

variables: N variables on the op's device.
handles: [N] handles of the variables.
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
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("G: {half, bfloat16, float, double}")
    .Attr("S: {half, bfloat16, float, double} = DT_FLOAT")
    .Attr("use_locking: bool = true")
    .SetIsStateful()
    .SetShapeFn(ApplyBundleShape)
    .Doc(R"doc(
Wrapopt>Apply<Rule> for variables in a bundle.

handles: From Wrapopt>Bundle: the rule's states, N of each, in the order of the
  inputs of Wrapopt>Apply<Rule>; then the N * K shadows.
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
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("S: {half, bfloat16, float, double}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return CheckBundle(c, 1); })
    .Doc(R"doc(
Wrapopt>EmaUpdate for variables in a bundle.

handles: From Wrapopt>Bundle: the N * K shadows, then the N values.
decays: [K], as in Wrapopt>EmaUpdate.
NK: N * K.
T: dtype of the values.
S: dtype of the shadows: T, or float if T is half or bfloat16.
)doc");

}  // namespace wrapopt
