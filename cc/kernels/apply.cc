// Wrapopt>Apply: the inner optimizer's step and the averages of its result in
// one pass.
#include <cstddef>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/engine/elementwise.h"
#include "cc/engine/isa.h"
#include "cc/engine/number.h"
#include "cc/engine/row_step.h"
#include "cc/engine/sparse_rows.h"
#include "cc/kernels/averages.h"
#include "cc/kernels/gpu.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/registration.h"
#include "cc/kernels/rows_gpu.h"
#include "cc/kernels/sort_rows.h"
#include "cc/kernels/threads.h"
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
    const RuleInfo& rule = contract_.rule();
    step_ = FindStep(rule.id, dtype_, grad_dtype_, isa);
    sum_step_ = FindStep(rule.id, dtype_, NumberOf(contract_.compute_dtype()),
                         isa);
    row_step_ = RowStep(rule, dtype_, grad_dtype_, isa);
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
    call.rows.resize(sparse() ? n : 0);
    for (int i = 0; i < n; ++i) {
      OP_REQUIRES_OK(
          ctx, sparse() ? ReadRows(ctx, &call, i)
                        : variables.CheckSameShape(call.grads[i].shape(),
                                                   "grad", i, /*like=*/i));
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
    tensorflow::OpInputList grads;
    std::vector<Rows> rows;  // If the gradients are sparse.
    const double* scalars;
    std::vector<double> rates;
    // For each variable: its averages, if their rows may lag behind.
    std::vector<std::vector<LazyAverage>> averages;
  };

  bool sparse() const { return contract_.sparse(); }

  void AddStates(Call* call, int i, std::vector<void*>* data) const {
    for (int s = 0; s < contract_.states(); ++s) {
      data->push_back(call->variables.data(contract_.state(s) + i));
    }
  }
  std::vector<void*> StatesOf(Call* call, int i) const {
    std::vector<void*> data;
    AddStates(call, i, &data);
    return data;
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
    for (int s = 0; s < contract_.states(); ++s) {
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
                           StatesOf(call, i), call->averages[i]});
        continue;
      }
      row_step_.Run(IntraOpThreads(ctx), StatesOf(call, i), all, elements,
                    rows.values.data(), rows.sorted, call->scalars,
                    call->averages[i]);
    }
    if (!on_gpu) return absl::OkStatus();
    return RowsStep{contract_.rule(), step_,     sum_step_,
                    call->scalars,    averages_, call->rates}
        .Run(ctx, updates);
  }

  // Takes the step of dense gradients, and that of averages of all rows.
  absl::Status TakePass(OpKernelContext* ctx, Call* call) const {
    if (sparse() && averages_.per_value() == 0) return absl::OkStatus();
    const size_t var_bytes = SizeOf(dtype_);
    const size_t state_bytes = 2 * contract_.states() * var_bytes;
    Pass pass;
    if (!sparse()) {
      pass.AddStage({step_, call->scalars, contract_.states() + 1,
                     state_bytes + SizeOf(grad_dtype_), /*new_inputs=*/true});
    }
    averages_.AddStages(call->rates, sparse() ? var_bytes : 0, &pass);
    // One array for all variables: a step may have hundreds.
    std::vector<void*> operands;
    for (int i = 0; i < contract_.variables(); ++i) {
      operands.clear();
      if (!sparse()) {
        AddStates(call, i, &operands);
        operands.push_back(call->grads[i].data());
      }
      averages_.AddOperands(&call->variables, contract_.shadows(),
                            /*values=*/0, i, &operands);
      pass.AddVariable(call->variables.size(i), operands);
    }
    return IsOnGpu(ctx) ? RunPassOnGpu(ctx, pass) : RunPass(ctx, pass);
  }

  Variables::LookupCache lookup_cache_;
  Averages averages_;
  ApplyContract contract_;
  std::vector<VariableList> lists_;
  Variables::Access access_;
  Number dtype_;
  Number grad_dtype_;
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
