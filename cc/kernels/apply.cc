// Wrapopt>Apply: the inner optimizer's step and the averages of its result in
// one pass.
#include <cstddef>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
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
#include "cc/ops/apply.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class ApplyOp : public OpKernel {
 public:
  explicit ApplyOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    Isa isa;
    OP_REQUIRES_OK(ctx, FindIsa(&isa));
    OP_REQUIRES_OK(ctx, averages_.Init(ctx, isa));
    bool use_locking;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("use_locking", &use_locking));
    access_ = use_locking ? Variables::Access::kWrite
                          : Variables::Access::kWriteUnlocked;
    OP_REQUIRES_OK(ctx, contract_.Init(ctx, averages_));
    lists_ = contract_.Lists(averages_);
    dtype_ = NumberOf(contract_.dtype());
    grad_dtype_ = NumberOf(contract_.grad_dtype());
    sum_dtype_ = NumberOf(contract_.compute_dtype());
    const RuleInfo& rule = contract_.rule();
    step_ = FindStep(rule.id, dtype_, grad_dtype_, isa);
    sum_step_ = FindStep(rule.id, dtype_, sum_dtype_, isa);
    row_step_ = RowStep(rule, dtype_, grad_dtype_, isa);
    if (is_compensated()) {
      compensation_ =
          Compensation(*contract_.policy(), dtype_, grad_dtype_, isa);
    }
  }

  void Compute(OpKernelContext* ctx) override {
    bool accept = false;
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, "accept", &accept));
    if (!accept) return;

    Call call = {Variables(ctx, &lookup_cache_)};
    const Tensor* scalars;
    OP_REQUIRES_OK(ctx, ctx->input("scalars", &scalars));
    OP_REQUIRES_OK(ctx, contract_.CheckScalars(scalars->shape()));
    call.scalars = scalars->vec<double>().data();
    call.policy_scalars = call.scalars + contract_.rule_scalars();
    std::vector<double> logs;
    OP_REQUIRES_OK(ctx, averages_.ReadDecays(ctx, &call.rates, &logs));
    const bool lazy = averages_.lazy();

    Variables& variables = call.variables;
    const int n = contract_.variables();
    const int shadows = contract_.shadows();
    const int log_decays = contract_.log_decays(averages_);
    OP_REQUIRES_OK(ctx, variables.Find(lists_, access_));
    OP_REQUIRES_OK(ctx, variables.Lock());
    OP_REQUIRES_OK(ctx, contract_.CheckVariables(variables, averages_));
    averages_.ShapeLogDecays(&variables, log_decays, /*values=*/0);
    OP_REQUIRES_OK(ctx, ctx->input_list("grad", &call.grads));
    OP_REQUIRES_OK(ctx, ctx->input_list("origins", &call.origins));
    call.rows.resize(sparse() ? n : 0);
    for (int i = 0; i < n; ++i) {
      OP_REQUIRES_OK(
          ctx, sparse() ? ReadRows(ctx, &call, i)
                        : variables.CheckSameShape(call.grads[i].shape(),
                                                   "grad", i, /*like=*/i));
      if (is_compensated()) OP_REQUIRES_OK(ctx, CheckOrigin(&call, i));
    }
    // Rows that lag behind may have to catch up.
    if (!lazy) averages_.LeaveIdle(call.rates, shadows, &variables);
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite());

    call.averages.resize(n);
    for (int i = 0; lazy && i < n; ++i) {
      call.averages[i] =
          averages_.OfValue(&variables, shadows, /*values=*/0, log_decays, i,
                            call.rates, logs);
      if (!IsOnGpu(ctx)) {
        averages_.WarnIfReplaced(variables, i, call.averages[i]);
      }
    }
    if (sparse()) OP_REQUIRES_OK(ctx, TakeRows(ctx, &call));
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
    tensorflow::OpInputList grads, origins;
    std::vector<Rows> rows;  // If the gradients are sparse.
    const double *scalars, *policy_scalars;
    std::vector<double> rates;
    // For each variable: its averages, if their rows may lag behind.
    std::vector<std::vector<LazyAverage>> averages;
  };

  bool sparse() const { return contract_.sparse(); }
  bool is_compensated() const { return contract_.policy() != nullptr; }

  // The states of a variable, and those of the policy; none if there is none.
  void AddStates(Call* call, int i, std::vector<void*>* data) const {
    for (int s = 0; s < contract_.rule_states(); ++s) {
      data->push_back(call->variables.data(contract_.state(s) + i));
    }
  }
  std::vector<void*> StatesOf(Call* call, int i) const {
    std::vector<void*> data;
    AddStates(call, i, &data);
    return data;
  }
  std::vector<void*> MemoryOf(Call* call, int i) const {
    std::vector<void*> data;
    for (int m = 0; m < contract_.memory_states(); ++m) {
      data.push_back(call->variables.data(contract_.memory(m) + i));
    }
    return data;
  }
  // As many as each variable of a GPU's pass has.
  std::vector<void*> MemoryOnGpu(Call* call, int i) const {
    std::vector<void*> data = MemoryOf(call, i);
    data.resize(kMostPolicyStates);
    return data;
  }

  absl::Status CheckOrigin(Call* call, int i) const {
    const Tensor& origin = call->origins[i];
    TF_RETURN_IF_ERROR(
        contract_.CheckOrigins(i, origin.shape(), call->grads[i].shape()));
    // A resource variable is copied before it changes.
    if (call->variables.resource(i) != nullptr || origin.NumElements() == 0 ||
        !origin.SharesBufferWith(*call->variables.tensor(i))) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "origins[", i, "] must be a copy of the weights, got the buffer of ",
        call->variables.Describe(i),
        ", which every step changes. Pass a copy that was made before the "
        "gradient was computed"));
  }

  // Checks a sparse gradient and sorts its rows.
  absl::Status ReadRows(OpKernelContext* ctx, Call* call, int i) const {
    Variables& variables = call->variables;
    Rows* const rows = &call->rows[i];
    const Tensor& grad = call->grads[i];
    tensorflow::OpInputList indices;
    TF_RETURN_IF_ERROR(ctx->input_list("indices", &indices));
    TF_RETURN_IF_ERROR(contract_.CheckRows(variables, i, grad.shape(),
                                           indices[i].shape()));
    TF_RETURN_IF_ERROR(
        SortRows(ctx, indices[i], i, variables, i, &rows->sorted));
    rows->values = grad;
    // A ref variable is read in place: the step of one row must not change the
    // gradient of another one.
    for (int s = 0; s < contract_.rule_states(); ++s) {
      if (!rows->values.SharesBufferWith(
              *variables.tensor(contract_.state(s) + i))) {
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
    return rows->on_gpu.Find(ctx, rows->values, rows->sorted,
                             contract_.compute_dtype());
  }

  // Takes the step of rows, and that of their averages if these may lag behind.
  absl::Status TakeRows(OpKernelContext* ctx, Call* call) const {
    const bool on_gpu = IsOnGpu(ctx);
    std::vector<RowsUpdate> updates;
    for (int i = 0; i < contract_.variables(); ++i) {
      const Rows& rows = call->rows[i];
      const int64_t elements = call->variables.size(i);
      const int64_t all = call->variables.shape(i).dim_size(0);
      if (on_gpu) {
        updates.push_back({&rows.on_gpu, all, all == 0 ? 0 : elements / all,
                           StatesOf(call, i),
                           is_compensated() ? call->origins[i].data() : nullptr,
                           MemoryOnGpu(call, i), call->averages[i]});
        continue;
      }
      RowCompensation compensated;
      if (is_compensated()) {
        compensated = {&compensation_, call->policy_scalars,
                       call->origins[i].data(), MemoryOf(call, i)};
      }
      row_step_.Run(IntraOpThreads(ctx), StatesOf(call, i), all, elements,
                    rows.values.data(), rows.sorted, call->scalars,
                    call->averages[i],
                    is_compensated() ? &compensated : nullptr);
    }
    if (!on_gpu) return absl::OkStatus();
    return RowsStep{contract_.rule(), step_,     sum_step_,   call->scalars,
                    averages_,        call->rates, OnGpu(*call)}
        .Run(ctx, updates);
  }

  // Takes the step of dense gradients, and that of averages of all rows.
  absl::Status TakePass(OpKernelContext* ctx, Call* call) const {
    if (sparse() && averages_.per_value() == 0) return absl::OkStatus();
    const size_t var_bytes = SizeOf(dtype_);
    const size_t state_bytes = 2 * contract_.rule_states() * var_bytes;
    const int operands_of_step = contract_.rule_states() + 1;
    const bool on_gpu = IsOnGpu(ctx);
    // A CPU compensates in stages of its own, a GPU in that of the step.
    const bool is_staged = !sparse() && is_compensated() && !on_gpu;
    const bool has_policy = !sparse() && is_compensated() && on_gpu;
    Pass pass(sum_dtype_);
    if (is_staged) {
      compensation_.AddStagesBefore(call->policy_scalars, &pass);
      pass.AddStage({sum_step_, call->scalars, operands_of_step,
                     state_bytes, /*new_inputs=*/false,
                     /*scratch=*/operands_of_step - 1});
      compensation_.AddStagesAfter(call->policy_scalars, &pass);
    } else if (!sparse()) {
      pass.AddStage({step_, call->scalars,
                     operands_of_step + (has_policy ? kPolicyOperands : 0),
                     state_bytes + SizeOf(grad_dtype_),
                     /*new_inputs=*/true});
    }
    averages_.AddStages(call->rates, sparse() ? var_bytes : 0, &pass);
    // One array for all variables: a step may have hundreds.
    std::vector<void*> operands;
    for (int i = 0; i < contract_.variables(); ++i) {
      operands.clear();
      void* const value = call->variables.data(i);
      if (is_staged) {
        compensation_.AddOperandsBefore(value, call->origins[i].data(),
                                        call->grads[i].data(),
                                        MemoryOf(call, i), &operands);
        AddStates(call, i, &operands);
        operands.push_back(nullptr);
        compensation_.AddOperandsAfter(value, MemoryOf(call, i), &operands);
      } else if (!sparse()) {
        AddStates(call, i, &operands);
        operands.push_back(call->grads[i].data());
      }
      if (has_policy) {
        operands.push_back(call->origins[i].data());
        const std::vector<void*> memory = MemoryOnGpu(call, i);
        operands.insert(operands.end(), memory.begin(), memory.end());
      }
      averages_.AddOperands(&call->variables, contract_.shadows(),
                            /*values=*/0, i, &operands);
      pass.AddVariable(call->variables.size(i), operands);
    }
    if (on_gpu) {
      return RunPassOnGpu(ctx, pass, /*lazy=*/nullptr,
                          has_policy ? OnGpu(*call) : CompensationOnGpu());
    }
    return RunPass(ctx, pass);
  }

  CompensationOnGpu OnGpu(const Call& call) const {
    if (!is_compensated()) return {};
    return {contract_.policy(),
            {call.policy_scalars,
             call.policy_scalars + contract_.policy_scalars()}};
  }

  Variables::LookupCache lookup_cache_;
  Averages averages_;
  ApplyContract contract_;
  std::vector<VariableList> lists_;
  Compensation compensation_;
  Variables::Access access_;
  Number dtype_;
  Number grad_dtype_;
  Number sum_dtype_;
  RuleStep step_;
  RuleStep sum_step_;
  RowStep row_step_;
};

// On a GPU, the kernel reads row numbers on the host, to check them.
const bool apply_registered =
    RegisterKernel<ApplyOp>("Wrapopt>Apply", {"variables", "indices", "scalars",
                                              "decays", "accept"}) &&
    RegisterKernel<ApplyOp>("Wrapopt>ApplyRef",
                            {"indices", "scalars", "decays", "accept"});

}  // namespace
}  // namespace wrapopt
