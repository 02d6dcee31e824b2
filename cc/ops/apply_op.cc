#include "cc/ops/apply_op.h"

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "cc/ops/handle_shapes.h"
#include "cc/ops/shadows.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def_builder.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Inputs in order: each state (N), grad (N), indices (N, sparse), the scalars
// that are inputs, shadows (NK), decays, accept, log_decays (NL, sparse, not
// ref).
absl::Status ApplyShape(InferenceContext* c, const RuleInfo& rule, bool sparse,
                        bool ref) {
  int n;
  tensorflow::DataType dtype, grad_dtype;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
  TF_RETURN_IF_ERROR(c->GetAttr("T", &dtype));
  TF_RETURN_IF_ERROR(c->GetAttr("G", &grad_dtype));
  if (!FitsLowPrecision(grad_dtype, dtype)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "grad must be of dtype ", tensorflow::DataTypeString(dtype),
        ", the variables', or float for half and bfloat16, got ",
        tensorflow::DataTypeString(grad_dtype)));
  }
  const std::vector<std::string> states = absl::StrSplit(rule.states, ' ');
  int input = 0;
  for (const std::string& state : states) {
    for (int i = 0; i < n; ++i, ++input) {
      const std::string subject = absl::StrCat(state, "[", i, "]");
      if (!ref) {
        TF_RETURN_IF_ERROR(CheckVariableDtype(c, input, subject, dtype));
      }
      TF_RETURN_IF_ERROR(CheckSameShape(c, ref, input, subject, i,
                                        absl::StrCat("var[", i, "]")));
    }
  }
  for (int i = 0; i < n; ++i, ++input) {
    const ShapeHandle var = VariableShape(c, i, ref);
    ShapeHandle expected = var;
    if (sparse) {
      TF_RETURN_IF_ERROR(CheckIndices(c, i, input + n, var, "var"));
      if (!c->RankKnown(var)) continue;
      TF_RETURN_IF_ERROR(
          c->ReplaceDim(var, 0, c->Dim(c->input(input + n), 0), &expected));
    }
    ShapeHandle merged;
    if (!c->Merge(c->input(input), expected, &merged).ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("grad[", i, "] misshapen: got ",
                       c->DebugString(c->input(input)), " but expected ",
                       c->DebugString(expected),
                       sparse ? " (a row for each index)" : " (the shape of ",
                       sparse ? "" : absl::StrCat("var[", i, "])")));
    }
  }
  if (sparse) input += n;
  for (const absl::string_view name : absl::StrSplit(rule.scalars, ' ')) {
    if (absl::EndsWith(name, "?")) continue;
    ShapeHandle scalar;
    if (!c->WithRank(c->input(input), 0, &scalar).ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, " misshapen: got ",
                       c->DebugString(c->input(input)),
                       " but expected [] (a scalar)"));
    }
    ++input;
  }
  int shadows;
  TF_RETURN_IF_ERROR(c->GetAttr("NK", &shadows));
  TF_RETURN_IF_ERROR(
      CheckShadows(c, ref, input, /*values=*/0, "var", input + shadows));
  ShapeHandle accept;
  if (!c->WithRank(c->input(input + shadows + 1), 0, &accept).ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "accept misshapen: got ",
        c->DebugString(c->input(input + shadows + 1)),
        " but expected [] (a scalar)"));
  }
  return sparse && !ref ? CheckLogDecays(c, /*values=*/0, input + shadows + 2)
                        : absl::OkStatus();
}

constexpr char kDoc[] = R"doc(
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
accept: A scalar. If false, nothing is changed, and the op returns at once.
T: dtype of the variables and their slots.
G: dtype of the gradients: T, or float where T is half or bfloat16.
S: dtype of the shadows: T, or float where T is half or bfloat16.
use_locking: Whether the variables are locked against other updates.
)doc";

constexpr char kSparseArguments[] = R"doc(
indices: N vectors: the rows of each variable that its gradient is for.
  Gradients of one row are summed first.
)doc";

constexpr char kLazyArguments[] = R"doc(
log_decays: None, and each step moves all rows of the shadows; or one for each
  shadow, and a step moves the rows that it touches: see CatchUp. Not for a
  rule that changes all rows.
)doc";

tensorflow::OpDefBuilder Builder(const RuleInfo& rule, bool sparse, bool ref,
                                 const std::string& summary,
                                 const std::string& details) {
  tensorflow::OpDefBuilder op(absl::StrCat(
      "Wrapopt>", sparse ? "Sparse" : "", "Apply", rule.name, ref ? "Ref" : ""));
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
    op.Attr(absl::StrCat(dtype, ": {half, bfloat16, float, double}"));
  }
  // Stands for itself where there are no shadows to tell.
  op.Attr("S: {half, bfloat16, float, double} = DT_FLOAT");
  if (sparse) op.Attr("I: {int32, int64}");
  op.Attr("use_locking: bool = true");
  op.SetIsStateful();
  op.SetShapeFn([&rule, sparse, ref](InferenceContext* c) {
    return ApplyShape(c, rule, sparse, ref);
  });
  op.Doc(absl::StrCat("\n", summary, kDoc, details, kCommonArguments + 1,
                      sparse ? kSparseArguments + 1 : "",
                      lazy ? kLazyArguments + 1 : ""));
  return op;
}

}  // namespace

bool DefineApplyOps(RuleId rule, const std::string& summary,
                    const std::string& details) {
  for (const bool sparse : {false, true}) {
    for (const bool ref : {false, true}) {
      const auto op = Builder(Info(rule), sparse, ref, summary, details);
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
