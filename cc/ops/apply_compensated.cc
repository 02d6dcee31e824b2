// Wrapopt>ApplyCompensated, its sparse form, and both for ref variables.
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/ops/apply_op.h"
#include "cc/ops/contracts.h"
#include "cc/ops/inferred_inputs.h"
#include "cc/ops/number_types.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def_builder.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace wrapopt {
namespace {

using tensorflow::PartialTensorShape;
using tensorflow::shape_inference::InferenceContext;

absl::Status CompensatedShape(InferenceContext* c, bool sparse, bool ref) {
  std::string name;
  const RuleInfo* rule;
  TF_RETURN_IF_ERROR(c->GetAttr("rule", &name));
  TF_RETURN_IF_ERROR(FindUpdate(name, &rule));
  ApplyContract contract;
  CompensationContract compensation;
  ShadowContract averages;
  TF_RETURN_IF_ERROR(
      contract.Init(c, *rule, ApplyContract::Scalars::kVector));
  TF_RETURN_IF_ERROR(compensation.Init(c, *rule));
  TF_RETURN_IF_ERROR(averages.Init(c));
  TF_RETURN_IF_ERROR(contract.CheckLazy(averages, *rule));
  InferredInputs inputs(c, ref);
  const int n = contract.variables();
  int var, memory, shadows;
  TF_RETURN_IF_ERROR(inputs.FindVariables("states", "T", &var));
  std::vector<PartialTensorShape> grads, indices, origins;
  TF_RETURN_IF_ERROR(inputs.FindTensors("grad", &grads));
  if (sparse) TF_RETURN_IF_ERROR(inputs.FindTensors("indices", &indices));
  TF_RETURN_IF_ERROR(inputs.FindTensors("origins", &origins));
  TF_RETURN_IF_ERROR(inputs.FindVariables("memory", "P", &memory));
  PartialTensorShape scalars, policy_scalars;
  TF_RETURN_IF_ERROR(inputs.FindTensor("scalars", &scalars));
  TF_RETURN_IF_ERROR(contract.CheckScalars(scalars));
  TF_RETURN_IF_ERROR(inputs.FindTensor("policy_scalars", &policy_scalars));
  TF_RETURN_IF_ERROR(compensation.CheckScalars(policy_scalars));
  TF_RETURN_IF_ERROR(inputs.FindVariables("shadows", "S", &shadows));
  TF_RETURN_IF_ERROR(inputs.FindDecays(averages));
  TF_RETURN_IF_ERROR(inputs.FindScalar("accept"));

  TF_RETURN_IF_ERROR(averages.Check(inputs, shadows, var));
  if (averages.lazy()) {
    int log_decays;
    TF_RETURN_IF_ERROR(
        inputs.FindVariables("log_decays", nullptr, &log_decays));
    TF_RETURN_IF_ERROR(averages.CheckLogDecays(inputs, log_decays, var));
  }
  std::vector<int> states;
  for (size_t s = 0; s < contract.states().size(); ++s) {
    states.push_back(var + s * n);
  }
  TF_RETURN_IF_ERROR(contract.CheckStates(inputs, states));
  TF_RETURN_IF_ERROR(compensation.CheckMemory(inputs, memory, var));
  for (int i = 0; i < n; ++i) {
    TF_RETURN_IF_ERROR(
        sparse ? contract.CheckRows(inputs, var + i, i, grads[i], indices[i])
               : inputs.CheckSameShape(grads[i], "grad", i, var + i));
    TF_RETURN_IF_ERROR(compensation.CheckOrigins(i, origins[i], grads[i]));
  }
  return absl::OkStatus();
}

constexpr char kCompensatedDoc[] = R"doc(
Takes a step of a rule with gradients that are compensated for their age, and
averages the result, in one pass over memory.

All variables are checked before any is changed. half and bfloat16 are computed
in float. cc/rules/compensation.h has the mathematics of the policies.

states: The rule's states, N of each, in the order of the inputs of
  Wrapopt>Apply<Rule>.
grad: N gradients, each of the shape of its variable.
origins: N tensors: the weights that the gradients were computed from, each of
  the shape of its gradient.
memory: The policy's states, N of each, in the order of cc/rules/rules.h. Each
  has the shape of its variable.
scalars: The rule's scalars, in the order of cc/rules/rules.h. A bool is 0 or 1.
policy_scalars: The policy's scalars, in the order of cc/rules/rules.h.
shadows: N * K averages, as in Wrapopt>Apply<Rule>.
decays: [K], as in Wrapopt>Apply<Rule>.
accept: A scalar. If false, nothing changes, and the op returns at once.
rule: The name of an update rule, such as Adam.
policy: ConstantDelayCompensation, DelayCompensation or GapAware.
NS: N * the number of the rule's states.
NP: N * the number of the policy's states.
NK: N * K.
T: dtype of the variables and their slots.
G: dtype of the gradients: T, or float if T is half or bfloat16.
P: dtype of the policy's states: double if T is double, else float.
S: dtype of the shadows: T, or float if T is half or bfloat16.
use_locking: Whether the variables are locked against other updates.
)doc";

constexpr char kCompensatedRowsDoc[] = R"doc(
indices: N vectors: the row numbers of each gradient. Gradients of one row are
  summed first, and the first of its origins counts. Only these rows of memory
  change.
)doc";

constexpr char kCompensatedLazyDoc[] = R"doc(
log_decays: As in Wrapopt>SparseApply<Rule>.
)doc";

tensorflow::OpDefBuilder CompensatedBuilder(bool sparse, bool ref) {
  tensorflow::OpDefBuilder op(absl::StrCat("Wrapopt>", sparse ? "Sparse" : "",
                                           "ApplyCompensated",
                                           ref ? "Ref" : ""));
  const bool lazy = sparse && !ref;
  op.Input(ref ? "states: Ref(NS * T)" : "states: NS * resource");
  op.Input("grad: N * G");
  if (sparse) op.Input("indices: N * I");
  op.Input("origins: N * T");
  op.Input(ref ? "memory: Ref(NP * P)" : "memory: NP * resource");
  op.Input("scalars: double");
  op.Input("policy_scalars: double");
  op.Input(ref ? "shadows: Ref(NK * S)" : "shadows: NK * resource");
  op.Input("decays: double");
  op.Input("accept: bool");
  if (lazy) op.Input("log_decays: NL * resource");
  op.Attr("rule: string");
  op.Attr("policy: string");
  op.Attr("N: int >= 1");
  op.Attr("NS: int >= 1");
  op.Attr("NP: int >= 0");
  op.Attr("NK: int >= 0");
  if (lazy) op.Attr("NL: int >= 0");
  for (const char* dtype : {"T", "G"}) {
    op.Attr(absl::StrCat(dtype, ": " WRAPOPT_NUMBER_TYPES));
  }
  // With defaults, because there may be none to infer them from.
  op.Attr("P: {float, double} = DT_FLOAT");
  op.Attr("S: " WRAPOPT_NUMBER_TYPES " = DT_FLOAT");
  if (sparse) op.Attr("I: {int32, int64}");
  op.Attr("use_locking: bool = true");
  op.SetIsStateful();
  op.SetShapeFn([sparse, ref](InferenceContext* c) {
    return CompensatedShape(c, sparse, ref);
  });
  op.Doc(absl::StrCat(kCompensatedDoc, sparse ? kCompensatedRowsDoc + 1 : "",
                      lazy ? kCompensatedLazyDoc + 1 : ""));
  return op;
}

}  // namespace

const bool apply_compensated_defined = [] {
  for (const bool sparse : {false, true}) {
    for (const bool ref : {false, true}) {
      const auto op = CompensatedBuilder(sparse, ref);
      tensorflow::OpRegistry::Global()->Register(
          [op](tensorflow::OpRegistrationData* data) {
            return op.Finalize(data);
          });
    }
  }
  return true;
}();

}  // namespace wrapopt
