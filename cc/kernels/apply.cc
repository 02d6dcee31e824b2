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
#include "cc/kernels/averages_gpu.h"
#include "cc/kernels/gpu.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/parallel.h"
#include "cc/kernels/registration.h"
#include "cc/kernels/sort_rows.h"
#include "cc/kernels/variables.h"
#include "cc/ops/apply_op.h"
#include "cc/ops/contracts.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
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

    std::vector<double> scalars, policy_scalars, rates, logs;
    OP_REQUIRES_OK(ctx, ReadScalars(ctx, &scalars));
    if (is_compensated()) {
      const Tensor* vector;
      OP_REQUIRES_OK(ctx, ctx->input("policy_scalars", &vector));
      OP_REQUIRES_OK(ctx, policy_.CheckScalars(vector->shape()));
      policy_scalars = ToVector(*vector);
    }
    OP_REQUIRES_OK(ctx, averages_.ReadDecays(ctx, &rates, &logs));
    const bool lazy = averages_.lazy();

    Variables variables(ctx, &lookup_cache_, form_ == Form::kPacked);
    const int n = contract_.variables();
    std::vector<int> states(contract_.states().size());
    int memory = -1;
    if (is_compensated()) {
      OP_REQUIRES_OK(ctx, variables.Find("states", access_, &states[0]));
      OP_REQUIRES_OK(ctx, variables.Find("memory", access_, &memory));
    }
    for (size_t s = 0; s < states.size(); ++s) {
      if (is_compensated()) {
        states[s] = states[0] + s * n;
        continue;
      }
      OP_REQUIRES_OK(ctx, variables.Find(contract_.states()[s].c_str(), n,
                                         access_, &states[s]));
    }
    int shadows;
    OP_REQUIRES_OK(ctx, variables.Find("shadows", n * averages_.per_value(),
                                       access_, &shadows));
    int log_decays = -1;
    if (lazy) {
      OP_REQUIRES_OK(ctx, averages_.FindLogDecays(&variables, &log_decays));
    }
    OP_REQUIRES_OK(ctx, variables.Lock());

    const int var = states[0];
    OP_REQUIRES_OK(ctx, averages_.Check(variables, shadows, var));
    OP_REQUIRES_OK(ctx,
                   averages_.CheckLogDecays(&variables, log_decays, var));
    OP_REQUIRES_OK(ctx, contract_.CheckStates(variables, states));
    tensorflow::OpInputList grads;
    OP_REQUIRES_OK(ctx, ctx->input_list("grad", &grads));
    std::vector<Rows> rows(sparse_ ? n : 0);
    for (int i = 0; i < n; ++i) {
      OP_REQUIRES_OK(ctx,
                     sparse_ ? ReadRows(ctx, variables, states, i, &rows[i])
                             : variables.CheckSameShape(grads[i].shape(),
                                                        "grad", i, var + i));
    }
    tensorflow::OpInputList origins;
    if (is_compensated()) {
      OP_REQUIRES_OK(ctx, policy_.CheckMemory(variables, memory, var));
      OP_REQUIRES_OK(ctx, ctx->input_list("origins", &origins));
      OP_REQUIRES_OK(ctx, CheckOrigins(&variables, states, grads, origins));
    }
    // Rows that lag behind may have to catch up.
    if (!lazy) averages_.LeaveIdle(rates, shadows, &variables);
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite());

    // For each variable: its averages, if their rows may lag behind.
    std::vector<std::vector<LazyAverage>> averages(n);
    for (int i = 0; lazy && i < n; ++i) {
      averages[i] = averages_.OfValue(&variables, shadows, var, log_decays, i,
                                      rates, logs);
      if (!IsOnGpu(ctx)) {
        averages_.WarnIfReplaced(variables, var + i, averages[i]);
      }
    }
    if (sparse_ && IsOnGpu(ctx)) {
      OP_REQUIRES_OK(ctx, ApplyRowsOnGpu(ctx, &variables, states, rows, scalars,
                                         rates, averages));
    } else if (sparse_) {
      const IntraOpThreads threads(ctx);
      for (int i = 0; i < n; ++i) {
        std::vector<void*> data;
        for (const int state : states) {
          data.push_back(variables.data(state + i));
        }
        RowCompensation compensated;
        if (is_compensated()) {
          compensated = {&compensation_, policy_scalars.data(),
                         origins[i].data(), MemoryOf(&variables, memory, i)};
        }
        row_step_.Run(threads, data, variables.shape(var + i).dim_size(0),
                      variables.size(var + i), rows[i].values.data(),
                      rows[i].sorted, scalars.data(), averages[i],
                      is_compensated() ? &compensated : nullptr);
      }
    }
    if (lazy) return;
    Pass pass(NumberOf(sum_dtype_));
    const size_t var_bytes = SizeOf(NumberOf(dtype_));
    const size_t state_bytes = 2 * states.size() * var_bytes;
    const int step_operands = static_cast<int>(states.size()) + 1;
    if (!sparse_ && is_compensated()) {
      compensation_.AddStagesBefore(policy_scalars.data(), &pass);
      pass.AddStage({sum_step_, scalars.data(), step_operands, state_bytes,
                     /*new_inputs=*/false,
                     /*scratch=*/static_cast<int>(states.size())});
      compensation_.AddStagesAfter(policy_scalars.data(), &pass);
    } else if (!sparse_) {
      pass.AddStage({step_, scalars.data(), step_operands,
                     state_bytes + SizeOf(NumberOf(grad_dtype_)),
                     /*new_inputs=*/true});
    }
    averages_.AddStages(rates, sparse_ ? var_bytes : 0, &pass);
    if (!sparse_ || averages_.per_value() > 0) {
      std::vector<void*> operands;
      for (int i = 0; i < n; ++i) {
        operands.clear();
        const std::vector<void*> of_policy = MemoryOf(&variables, memory, i);
        if (!sparse_ && is_compensated()) {
          compensation_.AddOperandsBefore(variables.data(var + i),
                                          origins[i].data(), grads[i].data(),
                                          of_policy, &operands);
        }
        if (!sparse_) {
          for (const int state : states) {
            operands.push_back(variables.data(state + i));
          }
          operands.push_back(is_compensated() ? nullptr : grads[i].data());
        }
        if (!sparse_ && is_compensated()) {
          compensation_.AddOperandsAfter(variables.data(var + i), of_policy,
                                         &operands);
        }
        averages_.AddOperands(&variables, shadows, var, i, &operands);
        pass.AddVariable(variables.size(var + i), operands);
      }
      OP_REQUIRES_OK(ctx, RunPass(ctx, pass));
    }
  }

 private:
  // The sparse gradient of one variable.
  struct Rows {
    Tensor values;
    SparseRows sorted;
    // On a GPU: the different rows, sorted, and their gradients.
    std::vector<int64_t> index;
    std::vector<const void*> grad;
    Tensor sums;  // If a row has several gradients.
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

  // The policy's states of a variable; none if there is no policy.
  std::vector<void*> MemoryOf(Variables* variables, int memory, int i) const {
    std::vector<void*> data;
    for (size_t m = 0; is_compensated() && m < compensation_.states(); ++m) {
      data.push_back(
          variables->data(memory + m * contract_.variables() + i));
    }
    return data;
  }

  absl::Status CheckOrigins(Variables* variables,
                            const std::vector<int>& states,
                            const tensorflow::OpInputList& grads,
                            const tensorflow::OpInputList& origins) const {
    for (int i = 0; i < contract_.variables(); ++i) {
      TF_RETURN_IF_ERROR(policy_.CheckOrigins(i, origins[i].shape(),
                                              grads[i].shape()));
      const int var = states[0] + i;
      // A resource variable is copied before it changes.
      if (variables->resource(var) == nullptr && origins[i].NumElements() > 0 &&
          origins[i].SharesBufferWith(*variables->tensor(var))) {
        return absl::InvalidArgumentError(absl::StrCat(
            "origins[", i, "] must be a copy of the weights, got the buffer ",
            "of ", variables->Describe(var),
            ", which every step changes. Pass a copy that was made before the "
            "gradient was computed"));
      }
    }
    return absl::OkStatus();
  }

  // Checks a sparse gradient and sorts its rows.
  absl::Status ReadRows(OpKernelContext* ctx, Variables& variables,
                        const std::vector<int>& states, int i,
                        Rows* rows) const {
    tensorflow::OpInputList grads, indices_list;
    TF_RETURN_IF_ERROR(ctx->input_list("grad", &grads));
    TF_RETURN_IF_ERROR(ctx->input_list("indices", &indices_list));
    const Tensor& indices = indices_list[i];
    const int var = states[0] + i;
    TF_RETURN_IF_ERROR(contract_.CheckRows(variables, var, i, grads[i].shape(),
                                           indices.shape()));
    TF_RETURN_IF_ERROR(
        SortRows(ctx, indices, i, variables, var, &rows->sorted));
    rows->values = grads[i];
    // A ref variable is read in place: the step of one row must not change the
    // gradient of another one.
    for (const int state : states) {
      if (!rows->values.SharesBufferWith(*variables.tensor(state + i))) {
        continue;
      }
      TF_RETURN_IF_ERROR(ctx->allocate_temp(
          grads[i].dtype(), grads[i].shape(), &rows->values));
      if (IsOnGpu(ctx)) {
        TF_RETURN_IF_ERROR(CopyOnGpu(ctx, grads[i], &rows->values));
      } else {
        std::memcpy(rows->values.data(), grads[i].data(),
                    grads[i].TotalBytes());
      }
    }
    return IsOnGpu(ctx) ? FindRowsOnGpu(ctx, rows) : absl::OkStatus();
  }

  // Finds the gradient of each row, in device memory. If a row has several, all
  // rows are summed.
  absl::Status FindRowsOnGpu(OpKernelContext* ctx, Rows* rows) const {
    const SparseRows& sorted = rows->sorted;
    if (sorted.size() == 0) return absl::OkStatus();
    const int64_t row = rows->values.NumElements() / sorted.size();
    auto add = [rows, row](const Tensor& from, int64_t position) {
      rows->grad.push_back(
          static_cast<const char*>(from.data()) +
          position * row * tensorflow::DataTypeSize(from.dtype()));
    };
    gpu::RowSum sum;
    for (int64_t j = 0; j < sorted.size(); ++j) {
      if (sorted.BeginsRow(j)) rows->index.push_back(sorted[j].row);
      if (!sorted.repeat()) {
        add(rows->values, sorted[j].position);
        continue;
      }
      if (sorted.BeginsRow(j)) sum.runs.push_back({sum.runs.size(), {}});
      sum.runs.back().grads.push_back(sorted[j].position);
    }
    if (!sorted.repeat()) return absl::OkStatus();
    const int64_t runs = sum.runs.size();
    TF_RETURN_IF_ERROR(ctx->allocate_temp(
        sum_dtype_, tensorflow::TensorShape({runs, row}), &rows->sums));
    TF_RETURN_IF_ERROR(ZeroOnGpu(ctx, &rows->sums));
    for (int64_t run = 0; run < runs; ++run) add(rows->sums, run);
    sum.grads = reinterpret_cast<gpu::Address>(rows->values.data());
    sum.number = NumberOf(grad_dtype_);
    sum.sums = reinterpret_cast<gpu::Address>(rows->sums.data());
    sum.is_double = sum_dtype_ == tensorflow::DT_DOUBLE;
    sum.elements = row;
    return wrapopt::SumRowsOnGpu(ctx, sum);
  }

  // ApplyRows for all variables. The launcher gets a row, or several
  // consecutive rows, as a variable.
  absl::Status ApplyRowsOnGpu(OpKernelContext* ctx, Variables* variables,
                              const std::vector<int>& states,
                              const std::vector<Rows>& rows,
                              const std::vector<double>& scalars,
                              const std::vector<double>& rates,
                              const std::vector<std::vector<LazyAverage>>&
                                  averages) const {
    const size_t bytes = SizeOf(NumberOf(dtype_));
    const bool lazy = averages_.lazy();
    gpu::RowMarks marks;
    for (const bool summed : {false, true}) {
      Pass pass;
      LazyRows lazy_rows;
      pass.AddStage({summed ? sum_step_ : step_, scalars.data(),
                     static_cast<int>(states.size()) + 1, 0,
                     /*new_inputs=*/true});
      if (lazy) averages_.AddStages(rates, /*value_bytes=*/0, &pass);
      std::vector<void*> operands;
      for (size_t i = 0; i < rows.size(); ++i) {
        const Tensor& value = *variables->tensor(states[0] + i);
        if (rows[i].sorted.repeat() != summed || value.NumElements() == 0) {
          continue;
        }
        const int64_t row = value.NumElements() / value.dim_size(0);
        auto add = [&](const void* grad, int64_t begin, int64_t end) {
          operands.clear();
          for (const int state : states) {
            operands.push_back(static_cast<char*>(variables->data(state + i)) +
                               begin * row * bytes);
          }
          operands.push_back(const_cast<void*>(grad));
          if (lazy) {
            AddLazyRows(averages[i], begin, end, &operands, &lazy_rows);
          }
          pass.AddVariable((end - begin) * row, operands);
        };
        const std::vector<int64_t>& index = rows[i].index;
        const std::vector<const void*>& grad = rows[i].grad;
        const int64_t grad_bytes =
            row * SizeOf(NumberOf(summed ? sum_dtype_ : grad_dtype_));
        auto follows = [&](size_t u) {
          return (!lazy || AreAsOne(row)) && index[u] == index[u - 1] + 1 &&
                 static_cast<const char*>(grad[u]) -
                         static_cast<const char*>(grad[u - 1]) ==
                     grad_bytes;
        };
        int64_t next = 0;
        for (size_t u = 0; u < index.size();) {
          // Consecutive rows with consecutive gradients are one array.
          size_t end = u + 1;
          while (end < index.size() && follows(end)) ++end;
          if (rule_.sparse == Sparse::kAll) add(kZeros, next, index[u]);
          next = index[end - 1] + 1;
          add(grad[u], index[u], next);
          u = end;
        }
        if (rule_.sparse == Sparse::kAll) {
          add(kZeros, next, value.dim_size(0));
        }
        if (lazy) AddMarks(averages[i], index, &marks);
      }
      TF_RETURN_IF_ERROR(
          RunPassOnGpu(ctx, pass, lazy ? &lazy_rows : nullptr));
    }
    return lazy ? MarkRowsOnGpu(ctx, marks) : absl::OkStatus();
  }

  // The launcher's name for an array of zeros.
  static constexpr const void* kZeros = nullptr;

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
  for (const char* ref : {"", "Ref"}) {
    RegisterKernelOnCpu(
        absl::StrCat("Wrapopt>", kSparse ? "Sparse" : "", "ApplyCompensated",
                     ref),
        MakeApplyOfRule<Form::kCompensated, kSparse>);
  }
  return true;
}

const bool compensated_apply_registered =
    RegisterCompensated<false>() && RegisterCompensated<true>();

}  // namespace
}  // namespace wrapopt
