#include "cc/ops/apply_op.h"

#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "cc/ops/contracts.h"
#include "cc/ops/inferred_inputs.h"
#include "cc/ops/number_types.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def_builder.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace wrapopt {
namespace {

using tensorflow::PartialTensorShape;
using tensorflow::shape_inference::InferenceContext;

absl::Status ApplyShape(InferenceContext* c, const RuleInfo& rule, bool sparse,
                        bool ref) {
  ApplyContract contract;
  ShadowContract averages;
  TF_RETURN_IF_ERROR(contract.Init(c, rule));
  TF_RETURN_IF_ERROR(averages.Init(c));
  TF_RETURN_IF_ERROR(contract.CheckLazy(averages, rule));
  InferredInputs inputs(c, ref);
  std::vector<int> states;
  for (const std::string& state : contract.states()) {
    TF_RETURN_IF_ERROR(
        inputs.FindVariables(state.c_str(), "T", &states.emplace_back()));
  }
  std::vector<PartialTensorShape> grads, indices;
  TF_RETURN_IF_ERROR(inputs.FindTensors("grad", &grads));
  if (sparse) TF_RETURN_IF_ERROR(inputs.FindTensors("indices", &indices));
  for (const ApplyContract::Scalar& scalar : contract.scalars()) {
    if (scalar.is_attribute) continue;
    TF_RETURN_IF_ERROR(inputs.FindScalar(scalar.name.c_str()));
  }
  int shadows;
  TF_RETURN_IF_ERROR(inputs.FindVariables("shadows", "S", &shadows));
  TF_RETURN_IF_ERROR(inputs.FindDecays(averages));
  TF_RETURN_IF_ERROR(inputs.FindScalar("accept"));

  const int var = states[0];
  TF_RETURN_IF_ERROR(averages.Check(inputs, shadows, var));
  if (averages.lazy()) {
    int log_decays;
    TF_RETURN_IF_ERROR(
        inputs.FindVariables("log_decays", nullptr, &log_decays));
    TF_RETURN_IF_ERROR(averages.CheckLogDecays(inputs, log_decays, var));
  }
  TF_RETURN_IF_ERROR(contract.CheckStates(inputs, states));
  for (int i = 0; i < contract.variables(); ++i) {
    TF_RETURN_IF_ERROR(
        sparse ? contract.CheckRows(inputs, var + i, i, grads[i], indices[i])
               : inputs.CheckSameShape(grads[i], "grad", i, var + i));
  }
  return absl::OkStatus();
}

constexpr char kApplyDoc[] = R"doc(
Updates variables by their gradients and averages the result, in one pass over
memory.

All variables are checked before any is changed. half and bfloat16 are computed
in float.

)doc";

constexpr char kCommonArguments[] = R"doc(
grad: N gradients, each of the shape of its variable.
shadows: N * K averages, K >= 0: all N of the first decay, then all N of the
  second, and so on. Each has the shape of its variable.
decays: [K], each in [0, 1]. shadow += (1 - decay) (var - shadow) for the var
  after its update.
accept: A scalar. If false, nothing changes, and the op returns at once.
T: dtype of the variables and their slots.
G: dtype of the gradients: T, or float if T is half or bfloat16.
S: dtype of the shadows: T, or float if T is half or bfloat16.
use_locking: Whether the variables are locked against other updates.
)doc";

constexpr char kSparseArguments[] = R"doc(
indices: N vectors: the row numbers of each gradient. Gradients of one row are
  summed first.
)doc";

constexpr char kLazyArguments[] = R"doc(
log_decays: Empty: each step moves all rows of the shadows. Or one variable for
  each shadow: a step moves only the rows that it touches, see CatchUp. Must be
  empty for a rule that changes all rows.
)doc";

tensorflow::OpDefBuilder Builder(const RuleInfo& rule, bool sparse, bool ref,
                                 const std::string& summary,
                                 const std::string& details) {
  tensorflow::OpDefBuilder op(
      absl::StrCat("Wrapopt>", sparse ? "Sparse" : "", "Apply", rule.name,
                   ref ? "Ref" : ""));
  for (const absl::string_view state : absl::StrSplit(rule.states, ' ')) {
    op.Input(absl::StrCat(state, ref ? ": Ref(N * T)" : ": N * resource"));
  }
  op.Input("grad: N * G");
  if (sparse) op.Input("indices: N * I");
  for (absl::string_view name : absl::StrSplit(rule.scalars, ' ')) {
    if (absl::ConsumeSuffix(&name, "?")) {
      op.Attr(absl::StrCat(name, ": bool = false"));
    } else {
      op.Input(absl::StrCat(name, ": double"));
    }
  }
  op.Input(ref ? "shadows: Ref(NK * S)" : "shadows: NK * resource");
  op.Input("decays: double");
  op.Input("accept: bool");
  const bool lazy = sparse && !ref;
  if (lazy) op.Input("log_decays: NL * resource");
  op.Attr("N: int >= 1");
  op.Attr("NK: int >= 0");
  if (lazy) op.Attr("NL: int >= 0");
  for (const char* dtype : {"T", "G"}) {
    op.Attr(absl::StrCat(dtype, ": " WRAPOPT_NUMBER_TYPES));
  }
  // With a default, because there may be no shadows to infer it from.
  op.Attr("S: " WRAPOPT_NUMBER_TYPES " = DT_FLOAT");
  if (sparse) op.Attr("I: {int32, int64}");
  op.Attr("use_locking: bool = true");
  op.SetIsStateful();
  op.SetShapeFn([&rule, sparse, ref](InferenceContext* c) {
    return ApplyShape(c, rule, sparse, ref);
  });
  op.Doc(absl::StrCat("\n", summary, kApplyDoc, details, kCommonArguments + 1,
                      sparse ? kSparseArguments + 1 : "",
                      lazy ? kLazyArguments + 1 : ""));
  return op;
}

}  // namespace

bool DefineApplyOps(const char* rule, const std::string& summary,
                    const std::string& details) {
  const RuleInfo* info;
  TF_CHECK_OK(FindUpdate(rule, &info));
  for (const bool sparse : {false, true}) {
    for (const bool ref : {false, true}) {
      const auto op = Builder(*info, sparse, ref, summary, details);
      tensorflow::OpRegistry::Global()->Register(
          [op](tensorflow::OpRegistrationData* data) {
            return op.Finalize(data);
          });
    }
  }
  return true;
}

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

}  // namespace wrapopt
