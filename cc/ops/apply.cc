// Wrapopt>Apply, and its version for ref variables.
#include "cc/ops/apply.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "cc/ops/inferred_inputs.h"
#include "cc/ops/number_types.h"
#include "cc/ops/registration.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/errors.h"

namespace wrapopt {

using tensorflow::DataType;
using tensorflow::DataTypeString;
using tensorflow::OpKernelConstruction;
using tensorflow::PartialTensorShape;
using tensorflow::shape_inference::InferenceContext;

absl::Status FindUpdate(absl::string_view name, const RuleInfo** rule) {
  std::string names;
  for (const RuleInfo& info : kRules) {
    if (info.inputs != "grad") continue;
    if (name == info.name) {
      *rule = &info;
      return absl::OkStatus();
    }
    absl::StrAppend(&names, names.empty() ? "" : ", ", info.name);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("rule must be one of ", names, ", got '", name, "'"));
}

template <class Context>
absl::Status ApplyContract::Init(Context* ctx,
                                 const ShadowContract& averages) {
  std::string rule;
  TF_RETURN_IF_ERROR(ctx->GetAttr("rule", &rule));
  TF_RETURN_IF_ERROR(FindUpdate(rule, &rule_));
  states_ = absl::StrSplit(rule_->states, ' ');
  int indices;
  TF_RETURN_IF_ERROR(ctx->GetAttr("N", &n_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("NI", &indices));
  TF_RETURN_IF_ERROR(ctx->GetAttr("T", &dtype_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("G", &grad_dtype_));
  sparse_ = indices > 0;
  if (!FitsLowPrecision(grad_dtype_, dtype_)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "grad must be of dtype ", DataTypeString(dtype_), ", the variables'",
        OrFloat(dtype_), ", got ", DataTypeString(grad_dtype_)));
  }
  if (averages.lazy() && !(sparse_ && rule_->sparse == Sparse::kRows)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "log_decays must be empty for ",
        sparse_ ? rule_->name : "a dense gradient",
        ", whose step changes all rows of a variable"));
  }
  return absl::OkStatus();
}

template absl::Status ApplyContract::Init(OpKernelConstruction* ctx,
                                          const ShadowContract& averages);
template absl::Status ApplyContract::Init(InferenceContext* ctx,
                                          const ShadowContract& averages);

std::vector<VariableList> ApplyContract::Lists(
    const ShadowContract& averages) const {
  std::vector<VariableList> lists;
  for (const absl::string_view state : states_) lists.push_back({state, n_});
  lists.push_back({"shadows", averages.count()});
  lists.push_back({"log_decays", averages.lazy() ? averages.count() : 0,
                   /*is_read=*/false, tensorflow::DT_DOUBLE});
  return lists;
}

absl::Status ApplyContract::CheckVariables(
    const CheckedVariables& variables, const ShadowContract& averages) const {
  TF_RETURN_IF_ERROR(averages.Check(variables, shadows(), /*values=*/0));
  TF_RETURN_IF_ERROR(averages.CheckLogDecays(
      variables, log_decays(averages), /*values=*/0));
  for (int at = 0; at < shadows(); ++at) {
    TF_RETURN_IF_ERROR(variables.CheckDtype(at, dtype_));
    TF_RETURN_IF_ERROR(variables.CheckSameShape(at, at % n_));
  }
  return absl::OkStatus();
}

absl::Status ApplyContract::CheckScalars(
    const PartialTensorShape& shape) const {
  return CheckShape(
      "scalars", shape, Vector(scalars()),
      absl::StrReplaceAll(rule_->scalars, {{" ", ", "}, {"?", ""}}));
}

absl::Status ApplyContract::CheckRows(const CheckedVariables& variables, int i,
                                      const PartialTensorShape& grad,
                                      const PartialTensorShape& indices) const {
  TF_RETURN_IF_ERROR(variables.CheckHasRows(i));
  TF_RETURN_IF_ERROR(CheckIndices(i, indices));
  PartialTensorShape expected = variables.known_shape(i);
  if (expected.unknown_rank()) return absl::OkStatus();
  expected.set_dim(0, indices.unknown_rank() ? -1 : indices.dim_size(0));
  if (grad.IsCompatibleWith(expected)) return absl::OkStatus();
  return Misshapen(absl::StrCat("grad[", i, "]"), grad, expected.DebugString(),
                   absl::StrCat("a row of ", variables.Describe(i),
                                " for each of indices[", i, "]"));
}

namespace {

absl::Status ApplyShape(InferenceContext* c, bool ref) {
  ApplyContract contract;
  ShadowContract averages;
  TF_RETURN_IF_ERROR(averages.Init(c));
  TF_RETURN_IF_ERROR(contract.Init(c, averages));
  InferredInputs inputs(c, ref);
  std::vector<PartialTensorShape> grads, indices;
  PartialTensorShape scalars;
  TF_RETURN_IF_ERROR(inputs.FindVariables(contract.Lists(averages)));
  TF_RETURN_IF_ERROR(inputs.FindTensors("grad", &grads));
  TF_RETURN_IF_ERROR(inputs.FindTensors("indices", &indices));
  TF_RETURN_IF_ERROR(inputs.FindTensor("scalars", &scalars));
  TF_RETURN_IF_ERROR(contract.CheckScalars(scalars));
  TF_RETURN_IF_ERROR(inputs.FindDecays(averages));
  TF_RETURN_IF_ERROR(inputs.FindScalar("accept"));

  TF_RETURN_IF_ERROR(contract.CheckVariables(inputs, averages));
  for (int i = 0; i < contract.variables(); ++i) {
    TF_RETURN_IF_ERROR(
        contract.sparse() ? contract.CheckRows(inputs, i, grads[i], indices[i])
                          : inputs.CheckSameShape(grads[i], "grad", i, i));
  }
  return absl::OkStatus();
}

}  // namespace

const bool apply_defined = RegisterWithRef(
    "Wrapopt>Apply", ApplyShape, [](auto& op, bool ref) {
      op.Input(ref ? "variables: Ref(V)" : "variables: NV * resource");
      op.Input("grad: N * G");
      op.Input("indices: NI * I");
      op.Input("scalars: double");
      op.Input("decays: double");
      op.Input("accept: bool");
      op.Attr("rule: string");
      op.Attr(ref ? "V: list(" WRAPOPT_NUMBER_TYPES ") >= 1" : "NV: int >= 1");
      op.Attr("N: int >= 1");
      op.Attr("NI: int >= 0");
      op.Attr("NK: int >= 0");
      if (!ref) op.Attr("NL: int >= 0 = 0");
      op.Attr("T: " WRAPOPT_NUMBER_TYPES);
      op.Attr("G: " WRAPOPT_NUMBER_TYPES);
      // With defaults, because there may be none to infer them from.
      op.Attr("I: {int32, int64} = DT_INT64");
      op.Attr("S: " WRAPOPT_NUMBER_TYPES " = DT_FLOAT");
      op.Attr("use_locking: bool = true");
      op.Attr("policy: {''} = ''");
      op.Attr("NO: int = 0");
      op.Attr("O: type = DT_FLOAT");
      const std::string doc = R"doc(
Updates variables by their gradients and averages the result, in one pass over
memory.

All variables are checked before any is changed. half and bfloat16 are computed
in float. cc/rules/<rule>.h has the mathematics of a rule and of its scalars.

variables: The rule's states, N of each, in the order of cc/rules/rules.h; N * K
  averages, K >= 0: all N of the first decay, then all N of the second, and so
  on; NL log decays. Each has the shape of its variable. A tensor may hold the
  handles of several variables: see Wrapopt>Bundle.
grad: N gradients, each of the shape of its variable.
indices: Empty. Or N vectors: the row numbers of each gradient. Gradients of one
  row are summed first.
scalars: The rule's scalars, in the order of cc/rules/rules.h. A bool is 0 or 1.
decays: [K], each in [0, 1]. shadow += (1 - decay) (var - shadow) for the var
  after its update.
accept: A scalar. If false, nothing changes, and the op returns at once.
rule: The name of an update rule, such as Adam.
NK: N * K.
T: dtype of the variables and their slots.
G: dtype of the gradients: T, or float if T is half or bfloat16.
S: dtype of the averages: T, or float if T is half or bfloat16.
use_locking: Whether the variables are locked against other updates.
policy, NO, O: Only these values: graphs in older files name them.
)doc";
      // Ref variables have no rows that lag behind.
      op.Doc(ref ? doc : doc + (R"doc(
NL: 0: each step moves all rows of the averages. Or N * K, one log decay for
  each average: a step moves only the rows that it touches, see CatchUp. Must be
  0 for a rule that changes all rows.
)doc" + 1));
    });

}  // namespace wrapopt
