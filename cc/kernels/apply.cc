// Wrapopt>Apply<Rule> and Wrapopt>SparseApply<Rule> for every rule that updates
// a `var` by a `grad`, and Wrapopt>ApplyBundle and Wrapopt>ApplyCompensated for
// any of them: the inner optimizer's step and the averages of its result in one
// pass.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "cc/engine/compensation.h"
#include "cc/engine/elementwise.h"
#include "cc/engine/isa.h"
#include "cc/engine/number.h"
#include "cc/engine/row_step.h"
#include "cc/engine/sparse_rows.h"
#include "cc/kernels/averages.h"
#include "cc/kernels/gpu.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/parallel.h"
#include "cc/kernels/registration.h"
#include "cc/kernels/rows_gpu.h"
#include "cc/kernels/sort_rows.h"
#include "cc/kernels/variables.h"
#include "cc/ops/apply_op.h"
#include "cc/ops/contracts.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// The inputs of an op that takes a step.
enum class Form {
  kOfRule,       // Lists and scalars by their names.
  kPacked,       // A handle pack.
  kCompensated,  // One list of states, and those of a policy.
};

class ApplyOp : public OpKernel {
 public:
  ApplyOp(OpKernelConstruction* ctx, const RuleInfo& rule, bool sparse,
          Form form = Form::kOfRule)
      : OpKernel(ctx), rule_(rule), sparse_(sparse), form_(form) {
    Isa isa;
    OP_REQUIRES_OK(ctx, FindIsa(&isa));
    OP_REQUIRES_OK(ctx, averages_.Init(ctx, isa));
    bool use_locking;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("use_locking", &use_locking));
    access_ = use_locking ? Variables::Access::kWrite
                          : Variables::Access::kWriteUnlocked;
    OP_REQUIRES_OK(ctx, contract_.Init(ctx, rule,
                                       form == Form::kOfRule
                                           ? ApplyContract::Scalars::kByName
                                           : ApplyContract::Scalars::kVector));
    OP_REQUIRES_OK(ctx, contract_.CheckLazy(averages_, rule));
    dtype_ = contract_.dtype();
    grad_dtype_ = contract_.grad_dtype();
    step_ = FindStep(rule.id, NumberOf(dtype_), NumberOf(grad_dtype_), isa);
    // Gradients of one row are summed in the rule's compute type.
    sum_dtype_ = dtype_ == tensorflow::DT_DOUBLE ? tensorflow::DT_DOUBLE
                                                 : tensorflow::DT_FLOAT;
    sum_step_ = FindStep(rule.id, NumberOf(dtype_), NumberOf(sum_dtype_), isa);
    row_step_ = RowStep(rule, NumberOf(dtype_), NumberOf(grad_dtype_), isa);
    if (is_compensated()) {
      OP_REQUIRES_OK(ctx, policy_.Init(ctx, rule));
      compensation_ = Compensation(policy_.policy(), NumberOf(dtype_),
                                   NumberOf(grad_dtype_), isa);
    }
  }

  void Compute(OpKernelContext* ctx) override {
    bool accept = false;
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, "accept", &accept));
    if (!accept) return;

    Call call = {Variables(ctx, &lookup_cache_, form_ == Form::kPacked)};
    std::vector<double> logs;
    OP_REQUIRES_OK(ctx, ReadScalars(ctx, &call.scalars));
    if (is_compensated()) {
      const Tensor* vector;
      OP_REQUIRES_OK(ctx, ctx->input("policy_scalars", &vector));
      OP_REQUIRES_OK(ctx, policy_.CheckScalars(vector->shape()));
      call.policy_scalars = ToVector(*vector);
    }
    OP_REQUIRES_OK(ctx, averages_.ReadDecays(ctx, &call.rates, &logs));
    const bool lazy = averages_.lazy();

    Variables& variables = call.variables;
    const int n = contract_.variables();
    std::vector<int>& states = call.states;
    states.resize(contract_.states().size());
    if (is_compensated()) {
      OP_REQUIRES_OK(ctx, variables.Find("states", access_, &states[0]));
      OP_REQUIRES_OK(ctx, variables.Find("memory", access_, &call.memory));
    }
    for (size_t s = 0; s < states.size(); ++s) {
      if (is_compensated()) {
        states[s] = states[0] + s * n;
        continue;
      }
      OP_REQUIRES_OK(ctx, variables.Find(contract_.states()[s].c_str(), n,
                                         access_, &states[s]));
    }
    OP_REQUIRES_OK(ctx, variables.Find("shadows", n * averages_.per_value(),
                                       access_, &call.shadows));
    int log_decays = -1;
    if (lazy) {
      OP_REQUIRES_OK(ctx, averages_.FindLogDecays(&variables, &log_decays));
    }
    OP_REQUIRES_OK(ctx, variables.Lock());

    const int var = states[0];
    OP_REQUIRES_OK(ctx, averages_.Check(variables, call.shadows, var));
    OP_REQUIRES_OK(ctx,
                   averages_.CheckLogDecays(&variables, log_decays, var));
    OP_REQUIRES_OK(ctx, contract_.CheckStates(variables, states));
    OP_REQUIRES_OK(ctx, ctx->input_list("grad", &call.grads));
    call.rows.resize(sparse_ ? n : 0);
    for (int i = 0; i < n; ++i) {
      OP_REQUIRES_OK(
          ctx, sparse_ ? ReadRows(ctx, &call, i)
                       : variables.CheckSameShape(call.grads[i].shape(), "grad",
                                                  i, var + i));
    }
    if (is_compensated()) {
      OP_REQUIRES_OK(ctx, policy_.CheckMemory(variables, call.memory, var));
      OP_REQUIRES_OK(ctx, ctx->input_list("origins", &call.origins));
      OP_REQUIRES_OK(ctx, CheckOrigins(&call));
    }
    // Rows that lag behind may have to catch up.
    if (!lazy) averages_.LeaveIdle(call.rates, call.shadows, &variables);
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite());

    call.averages.resize(n);
    for (int i = 0; lazy && i < n; ++i) {
      call.averages[i] = averages_.OfValue(&variables, call.shadows, var,
                                           log_decays, i, call.rates, logs);
      if (!IsOnGpu(ctx)) {
        averages_.WarnIfReplaced(variables, var + i, call.averages[i]);
      }
    }
    if (sparse_) OP_REQUIRES_OK(ctx, TakeRows(ctx, &call));
    if (!lazy) OP_REQUIRES_OK(ctx, TakePass(ctx, &call));
  }

 private:
  // The sparse gradient of one variable.
  struct Rows {
    Tensor values;
    SparseRows sorted;
    RowsOnGpu on_gpu;
  };

  // The inputs of one call, after they were checked.
  struct Call {
    Variables variables;
    // The first positions of lists of variables.
    std::vector<int> states;
    int memory = -1, shadows = -1;
    tensorflow::OpInputList grads, origins;
    std::vector<Rows> rows;  // If the gradients are sparse.
    std::vector<double> scalars, policy_scalars, rates;
    // For each variable: its averages, if their rows may lag behind.
    std::vector<std::vector<LazyAverage>> averages;
  };

  bool is_compensated() const { return form_ == Form::kCompensated; }

  static std::vector<double> ToVector(const Tensor& tensor) {
    const auto values = tensor.vec<double>();
    return {values.data(), values.data() + values.size()};
  }

  absl::Status ReadScalars(OpKernelContext* ctx,
                           std::vector<double>* scalars) const {
    if (form_ != Form::kOfRule) {
      const Tensor* vector;
      TF_RETURN_IF_ERROR(ctx->input("scalars", &vector));
      TF_RETURN_IF_ERROR(contract_.CheckScalars(vector->shape()));
      *scalars = ToVector(*vector);
      return absl::OkStatus();
    }
    for (const ApplyContract::Scalar& scalar : contract_.scalars()) {
      if (scalar.is_attribute) {
        scalars->push_back(scalar.attribute);
        continue;
      }
      TF_RETURN_IF_ERROR(
          ReadScalar(ctx, scalar.name, &scalars->emplace_back()));
    }
    return absl::OkStatus();
  }

  // The states of a variable, and those of the policy; none if there is none.
  static void AddStates(Call* call, int i, std::vector<void*>* data) {
    for (const int state : call->states) {
      data->push_back(call->variables.data(state + i));
    }
  }
  static std::vector<void*> StatesOf(Call* call, int i) {
    std::vector<void*> data;
    AddStates(call, i, &data);
    return data;
  }
  std::vector<void*> MemoryOf(Call* call, int i) const {
    std::vector<void*> data;
    for (size_t m = 0; is_compensated() && m < compensation_.states(); ++m) {
      data.push_back(call->variables.data(
          call->memory + m * contract_.variables() + i));
    }
    return data;
  }
  // As many as each variable of a GPU's pass has.
  std::vector<void*> MemoryOnGpu(Call* call, int i) const {
    std::vector<void*> data = MemoryOf(call, i);
    data.resize(kMostPolicyStates);
    return data;
  }

  absl::Status CheckOrigins(Call* call) const {
    for (int i = 0; i < contract_.variables(); ++i) {
      const Tensor& origin = call->origins[i];
      TF_RETURN_IF_ERROR(
          policy_.CheckOrigins(i, origin.shape(), call->grads[i].shape()));
      const int var = call->states[0] + i;
      // A resource variable is copied before it changes.
      if (call->variables.resource(var) == nullptr &&
          origin.NumElements() > 0 &&
          origin.SharesBufferWith(*call->variables.tensor(var))) {
        return absl::InvalidArgumentError(absl::StrCat(
            "origins[", i, "] must be a copy of the weights, got the buffer ",
            "of ", call->variables.Describe(var),
            ", which every step changes. Pass a copy that was made before the "
            "gradient was computed"));
      }
    }
    return absl::OkStatus();
  }

  // Checks a sparse gradient and sorts its rows.
  absl::Status ReadRows(OpKernelContext* ctx, Call* call, int i) const {
    Variables& variables = call->variables;
    Rows* const rows = &call->rows[i];
    const Tensor& grad = call->grads[i];
    tensorflow::OpInputList indices;
    TF_RETURN_IF_ERROR(ctx->input_list("indices", &indices));
    const int var = call->states[0] + i;
    TF_RETURN_IF_ERROR(contract_.CheckRows(variables, var, i, grad.shape(),
                                           indices[i].shape()));
    TF_RETURN_IF_ERROR(
        SortRows(ctx, indices[i], i, variables, var, &rows->sorted));
    rows->values = grad;
    // A ref variable is read in place: the step of one row must not change the
    // gradient of another one.
    for (const int state : call->states) {
      if (!rows->values.SharesBufferWith(*variables.tensor(state + i))) {
        continue;
      }
      TF_RETURN_IF_ERROR(
          ctx->allocate_temp(grad.dtype(), grad.shape(), &rows->values));
      if (IsOnGpu(ctx)) {
        TF_RETURN_IF_ERROR(CopyOnGpu(ctx, grad, &rows->values));
      } else {
        std::memcpy(rows->values.data(), grad.data(), grad.TotalBytes());
      }
    }
    if (!IsOnGpu(ctx)) return absl::OkStatus();
    return rows->on_gpu.Find(ctx, rows->values, rows->sorted, sum_dtype_);
  }

  // Takes the step of rows, and that of their averages if these may lag behind.
  absl::Status TakeRows(OpKernelContext* ctx, Call* call) const {
    const bool on_gpu = IsOnGpu(ctx);
    std::vector<RowsUpdate> updates;
    for (int i = 0; i < contract_.variables(); ++i) {
      const Rows& rows = call->rows[i];
      const int var = call->states[0] + i;
      const int64_t elements = call->variables.size(var);
      const int64_t all = call->variables.shape(var).dim_size(0);
      if (on_gpu) {
        updates.push_back({&rows.on_gpu, all, all == 0 ? 0 : elements / all,
                           StatesOf(call, i),
                           is_compensated() ? call->origins[i].data() : nullptr,
                           MemoryOnGpu(call, i), call->averages[i]});
        continue;
      }
      RowCompensation compensated;
      if (is_compensated()) {
        compensated = {&compensation_, call->policy_scalars.data(),
                       call->origins[i].data(), MemoryOf(call, i)};
      }
      row_step_.Run(IntraOpThreads(ctx), StatesOf(call, i), all, elements,
                    rows.values.data(), rows.sorted, call->scalars.data(),
                    call->averages[i],
                    is_compensated() ? &compensated : nullptr);
    }
    if (!on_gpu) return absl::OkStatus();
    return RowsStep{rule_,     step_,       sum_step_,    call->scalars,
                    averages_, call->rates, OnGpu(*call)}
        .Run(ctx, updates);
  }

  // Takes the step of dense gradients, and that of averages of all rows.
  absl::Status TakePass(OpKernelContext* ctx, Call* call) const {
    if (sparse_ && averages_.per_value() == 0) return absl::OkStatus();
    const int var = call->states[0];
    const size_t var_bytes = SizeOf(NumberOf(dtype_));
    const size_t state_bytes = 2 * call->states.size() * var_bytes;
    const int operands_of_step = static_cast<int>(call->states.size()) + 1;
    const bool on_gpu = IsOnGpu(ctx);
    // A CPU compensates in stages of its own, a GPU in that of the step.
    const bool is_staged = !sparse_ && is_compensated() && !on_gpu;
    const bool has_policy = !sparse_ && is_compensated() && on_gpu;
    Pass pass(NumberOf(sum_dtype_));
    if (is_staged) {
      compensation_.AddStagesBefore(call->policy_scalars.data(), &pass);
      pass.AddStage({sum_step_, call->scalars.data(), operands_of_step,
                     state_bytes, /*new_inputs=*/false,
                     /*scratch=*/operands_of_step - 1});
      compensation_.AddStagesAfter(call->policy_scalars.data(), &pass);
    } else if (!sparse_) {
      pass.AddStage({step_, call->scalars.data(),
                     operands_of_step + (has_policy ? kPolicyOperands : 0),
                     state_bytes + SizeOf(NumberOf(grad_dtype_)),
                     /*new_inputs=*/true});
    }
    averages_.AddStages(call->rates, sparse_ ? var_bytes : 0, &pass);
    // One array for all variables: a step may have hundreds.
    std::vector<void*> operands;
    for (int i = 0; i < contract_.variables(); ++i) {
      operands.clear();
      void* const value = call->variables.data(var + i);
      if (is_staged) {
        compensation_.AddOperandsBefore(value, call->origins[i].data(),
                                        call->grads[i].data(),
                                        MemoryOf(call, i), &operands);
        AddStates(call, i, &operands);
        operands.push_back(nullptr);
        compensation_.AddOperandsAfter(value, MemoryOf(call, i), &operands);
      } else if (!sparse_) {
        AddStates(call, i, &operands);
        operands.push_back(call->grads[i].data());
      }
      if (has_policy) {
        operands.push_back(call->origins[i].data());
        const std::vector<void*> memory = MemoryOnGpu(call, i);
        operands.insert(operands.end(), memory.begin(), memory.end());
      }
      averages_.AddOperands(&call->variables, call->shadows, var, i, &operands);
      pass.AddVariable(call->variables.size(var + i), operands);
    }
    if (on_gpu) {
      return RunPassOnGpu(ctx, pass, /*lazy=*/nullptr,
                          has_policy ? OnGpu(*call) : CompensationOnGpu());
    }
    return RunPass(ctx, pass);
  }

  CompensationOnGpu OnGpu(const Call& call) const {
    if (!is_compensated()) return {};
    return {&policy_.policy(), call.policy_scalars};
  }

  const RuleInfo& rule_;
  const bool sparse_;
  const Form form_;
  Variables::LookupCache lookup_cache_;
  Averages averages_;
  ApplyContract contract_;
  CompensationContract policy_;
  Compensation compensation_;
  Variables::Access access_;
  tensorflow::DataType dtype_;
  tensorflow::DataType grad_dtype_;
  tensorflow::DataType sum_dtype_;
  RuleStep step_;
  RuleStep sum_step_;
  RowStep row_step_;
};

template <int kRule, bool kSparse>
class ApplyOpOf : public ApplyOp {
 public:
  explicit ApplyOpOf(OpKernelConstruction* ctx)
      : ApplyOp(ctx, kRules[kRule], kSparse) {}
};

// The inputs that the kernel reads on the host. The row numbers of a sparse
// gradient are among them, because they are checked.
std::vector<std::string> InputsOnHost(const RuleInfo& rule, bool sparse,
                                      bool ref) {
  std::vector<std::string> names = {"decays", "accept"};
  if (sparse) names.push_back("indices");
  for (const absl::string_view name : absl::StrSplit(rule.scalars, ' ')) {
    if (!absl::EndsWith(name, "?")) names.emplace_back(name);
  }
  if (ref) return names;
  names.push_back("shadows");
  if (sparse) names.push_back("log_decays");
  for (const absl::string_view name : absl::StrSplit(rule.states, ' ')) {
    names.emplace_back(name);
  }
  return names;
}

template <int kRule, bool kSparse>
void Register() {
  for (const bool ref : {false, true}) {
    RegisterKernel<ApplyOpOf<kRule, kSparse>>(
        absl::StrCat("Wrapopt>", kSparse ? "Sparse" : "", "Apply",
                     kRules[kRule].name, ref ? "Ref" : ""),
        InputsOnHost(kRules[kRule], kSparse, ref));
  }
}

template <int... rules>
bool RegisterApply(std::integer_sequence<int, rules...>) {
  auto one = [](auto rule) {
    constexpr int kRule = decltype(rule)::value;
    if constexpr (kRules[kRule].inputs == "grad") {
      Register<kRule, false>();
      Register<kRule, true>();
    }
  };
  (one(std::integral_constant<int, rules>()), ...);
  return true;
}

const bool apply_registered =
    RegisterApply(std::make_integer_sequence<int, std::size(kRules)>());

// For an op with the attribute `rule`.
template <Form kForm, bool kSparse>
OpKernel* MakeApplyOfRule(OpKernelConstruction* ctx) {
  std::string name;
  const RuleInfo* rule = nullptr;
  absl::Status status = ctx->GetAttr("rule", &name);
  if (status.ok()) status = FindUpdate(name, &rule);
  ctx->SetStatus(status);
  return status.ok() ? new ApplyOp(ctx, *rule, kSparse, kForm) : nullptr;
}

const bool packed_apply_registered = RegisterKernel(
    "Wrapopt>ApplyBundle", {"handles", "scalars", "decays", "accept"},
    MakeApplyOfRule<Form::kPacked, false>);

template <bool kSparse>
bool RegisterCompensated() {
  for (const bool ref : {false, true}) {
    std::vector<std::string> on_host = {"scalars", "policy_scalars", "decays",
                                        "accept"};
    if (kSparse) on_host.push_back("indices");
    if (!ref) {
      on_host.insert(on_host.end(), {"states", "memory", "shadows"});
      if (kSparse) on_host.push_back("log_decays");
    }
    RegisterKernel(absl::StrCat("Wrapopt>", kSparse ? "Sparse" : "",
                                "ApplyCompensated", ref ? "Ref" : ""),
                   on_host, MakeApplyOfRule<Form::kCompensated, kSparse>);
  }
  return true;
}

const bool compensated_apply_registered =
    RegisterCompensated<false>() && RegisterCompensated<true>();

}  // namespace
}  // namespace wrapopt
