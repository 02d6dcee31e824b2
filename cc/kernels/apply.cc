// Wrapopt>Apply<Rule> and Wrapopt>SparseApply<Rule> for every rule that updates
// a `var` by a `grad`: the inner optimizer's step and the averages of its
// result in one pass.
#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/kernels/averages.h"
#include "cc/kernels/contracts.h"
#include "cc/kernels/elementwise_cpu.h"
#include "cc/kernels/gpu.h"
#include "cc/kernels/isa.h"
#include "cc/kernels/number.h"
#include "cc/kernels/parallel.h"
#include "cc/kernels/subnormals.h"
#include "cc/kernels/variables.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/kernel_def_builder.h"
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

double ReadNumber(Number number, const void* p) {
  switch (number) {
    case Number::kHalf:
      return Load(*static_cast<const Half*>(p));
    case Number::kBfloat16:
      return Load(*static_cast<const Bfloat16*>(p));
    case Number::kFloat:
      return *static_cast<const float*>(p);
    case Number::kDouble:
      return *static_cast<const double*>(p);
  }
  return 0;
}

class ApplyOp : public OpKernel {
 public:
  ApplyOp(OpKernelConstruction* ctx, const RuleInfo& rule, bool sparse)
      : OpKernel(ctx), rule_(rule), sparse_(sparse) {
    Isa isa;
    std::string error;
    OP_REQUIRES(ctx, ChosenIsa(&isa, &error),
                absl::InvalidArgumentError(error));
    OP_REQUIRES_OK(ctx, averages_.Init(ctx, isa));
    bool use_locking;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("use_locking", &use_locking));
    access_ = use_locking ? Variables::Access::kWrite
                          : Variables::Access::kWriteUnlocked;
    OP_REQUIRES_OK(ctx, contract_.Init(ctx, rule));
    dtype_ = contract_.dtype();
    grad_dtype_ = contract_.grad_dtype();
    step_ = FindStep(rule.id, NumberOf(dtype_), NumberOf(grad_dtype_), isa);
    // Gradients of one row are summed in the type that the rule computes in.
    sum_dtype_ = dtype_ == tensorflow::DT_DOUBLE ? tensorflow::DT_DOUBLE
                                                 : tensorflow::DT_FLOAT;
    sum_step_ = FindStep(rule.id, NumberOf(dtype_), NumberOf(sum_dtype_), isa);
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor* accept;
    OP_REQUIRES_OK(ctx, ctx->input("accept", &accept));
    OP_REQUIRES_OK(ctx, CheckScalar("accept", accept->shape()));
    if (!accept->scalar<bool>()()) return;

    std::vector<double> scalars, rates;
    OP_REQUIRES_OK(ctx, ReadScalars(ctx, &scalars));
    OP_REQUIRES_OK(ctx, averages_.ReadDecays(ctx, &rates));

    Variables variables(ctx, &memory_);
    std::vector<int> states(contract_.states().size());
    for (size_t s = 0; s < states.size(); ++s) {
      OP_REQUIRES_OK(ctx, variables.Find(contract_.states()[s].c_str(),
                                         access_, &states[s]));
    }
    int shadows;
    OP_REQUIRES_OK(ctx, variables.Find("shadows", access_, &shadows));
    OP_REQUIRES_OK(ctx, variables.Lock());

    const int n = contract_.variables();
    const int var = states[0];
    OP_REQUIRES_OK(ctx, averages_.Check(variables, shadows, var));
    OP_REQUIRES_OK(ctx, contract_.CheckStates(variables, states));
    std::vector<Rows> rows(sparse_ ? n : 0);
    for (int i = 0; i < n; ++i) {
      OP_REQUIRES_OK(ctx, sparse_ ? ReadRows(ctx, variables, var, i, &rows[i])
                                  : CheckGrad(ctx, variables, var, i));
    }
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite());

    if (sparse_ && IsOnGpu(ctx)) {
      OP_REQUIRES_OK(ctx,
                     ApplyRowsOnGpu(ctx, &variables, states, rows, scalars));
    } else if (sparse_) {
      for (int i = 0; i < n; ++i) {
        ApplyRows(ctx, &variables, states, i, rows[i], scalars);
      }
    }
    Pass pass;
    const size_t var_bytes = SizeOf(NumberOf(dtype_));
    if (!sparse_) {
      pass.AddStage({step_, scalars.data(), static_cast<int>(states.size()) + 1,
                     2 * states.size() * var_bytes +
                         SizeOf(NumberOf(grad_dtype_)),
                     /*new_inputs=*/true});
    }
    averages_.AddStages(rates, sparse_ ? var_bytes : 0, &pass);
    if (!sparse_ || averages_.per_value() > 0) {
      tensorflow::OpInputList grads;
      OP_REQUIRES_OK(ctx, ctx->input_list("grad", &grads));
      std::vector<void*> operands;
      for (int i = 0; i < n; ++i) {
        operands.clear();
        if (!sparse_) {
          for (const int state : states) {
            operands.push_back(variables.data(state + i));
          }
          operands.push_back(grads[i].data());
        }
        averages_.AddOperands(&variables, shadows, var, i, &operands);
        pass.AddVariable(variables.size(var + i), operands);
      }
      OP_REQUIRES_OK(ctx, RunPass(ctx, pass));
    }
  }

 private:
  // The gradient of one variable: its rows, in order, each once.
  struct Rows {
    std::vector<int64_t> index;
    std::vector<const void*> grad;
    Tensor sums;  // Where one row has several gradients.
    bool summed = false;
  };

  absl::Status ReadScalars(OpKernelContext* ctx,
                           std::vector<double>* scalars) const {
    for (const ApplyContract::Scalar& scalar : contract_.scalars()) {
      if (scalar.is_attribute) {
        scalars->push_back(scalar.attribute);
        continue;
      }
      const Tensor* tensor;
      TF_RETURN_IF_ERROR(ctx->input(scalar.name, &tensor));
      TF_RETURN_IF_ERROR(CheckScalar(scalar.name, tensor->shape()));
      scalars->push_back(tensor->scalar<double>()());
    }
    return absl::OkStatus();
  }

  absl::Status CheckGrad(OpKernelContext* ctx, Variables& variables, int var,
                         int i) const {
    tensorflow::OpInputList grads;
    TF_RETURN_IF_ERROR(ctx->input_list("grad", &grads));
    return variables.CheckSameShape(grads[i].shape(), "grad", i, var + i);
  }

  // Checks a sparse gradient, sorts its rows and sums those of one index.
  absl::Status ReadRows(OpKernelContext* ctx, Variables& variables, int var,
                        int i, Rows* rows) const {
    tensorflow::OpInputList grads, indices_list;
    TF_RETURN_IF_ERROR(ctx->input_list("grad", &grads));
    TF_RETURN_IF_ERROR(ctx->input_list("indices", &indices_list));
    const Tensor& grad = grads[i];
    const Tensor& indices = indices_list[i];
    TF_RETURN_IF_ERROR(contract_.CheckRows(variables, var + i, i, grad.shape(),
                                           indices.shape()));
    const Tensor& value = *variables.tensor(var + i);
    const int64_t m = indices.NumElements();
    std::vector<int64_t> index(m);
    for (int64_t j = 0; j < m; ++j) {
      index[j] = indices.dtype() == tensorflow::DT_INT32
                     ? indices.vec<int32_t>()(j)
                     : indices.vec<int64_t>()(j);
      if (index[j] < 0 || index[j] >= value.dim_size(0)) {
        return absl::InvalidArgumentError(absl::StrCat(
            "indices[", i, "][", j, "] must be in [0, ", value.dim_size(0),
            "), the rows of ", variables.Describe(var + i), ", got ",
            index[j]));
      }
    }
    std::vector<int64_t> order(m);
    std::iota(order.begin(), order.end(), 0);
    // Stable, so that gradients of one row are summed as they come.
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return index[a] < index[b];
    });
    for (int64_t j = 0; j < m; ++j) {
      if (j == 0 || index[order[j]] != index[order[j - 1]]) {
        rows->index.push_back(index[order[j]]);
      }
    }
    const int64_t row = m == 0 ? 0 : grad.NumElements() / m;
    const Number number = NumberOf(grad_dtype_);
    const char* data = static_cast<const char*>(grad.data());
    const int64_t unique = rows->index.size();
    if (unique == m) {
      for (const int64_t j : order) {
        rows->grad.push_back(data + j * row * SizeOf(number));
      }
      return absl::OkStatus();
    }
    rows->summed = true;
    TF_RETURN_IF_ERROR(ctx->allocate_temp(
        sum_dtype_, tensorflow::TensorShape({unique, row}), &rows->sums));
    if (IsOnGpu(ctx)) return SumRowsOnGpu(ctx, grad, index, order, row, rows);
    auto sum = [&](auto* sums) {
      const FlushSubnormals flush;
      std::fill_n(sums, unique * row, 0);
      int64_t to = -1;
      for (int64_t j = 0; j < m; ++j) {
        to += j == 0 || index[order[j]] != index[order[j - 1]];
        for (int64_t e = 0; e < row; ++e) {
          sums[to * row + e] += ReadNumber(
              number, data + (order[j] * row + e) * SizeOf(number));
        }
      }
      for (int64_t u = 0; u < unique; ++u) {
        rows->grad.push_back(sums + u * row);
      }
    };
    if (sum_dtype_ == tensorflow::DT_DOUBLE) {
      sum(rows->sums.flat<double>().data());
    } else {
      sum(rows->sums.flat<float>().data());
    }
    return absl::OkStatus();
  }

  // What follows the allocation of the sums, for a gradient in device memory.
  absl::Status SumRowsOnGpu(OpKernelContext* ctx, const Tensor& grad,
                            const std::vector<int64_t>& index,
                            const std::vector<int64_t>& order, int64_t row,
                            Rows* rows) const {
    TF_RETURN_IF_ERROR(ZeroOnGpu(ctx, &rows->sums));
    gpu::RowSum sum;
    sum.grads = reinterpret_cast<gpu::Address>(grad.data());
    sum.number = NumberOf(grad_dtype_);
    sum.sums = reinterpret_cast<gpu::Address>(rows->sums.data());
    sum.is_double = sum_dtype_ == tensorflow::DT_DOUBLE;
    sum.elements = row;
    const char* sums = static_cast<const char*>(rows->sums.data());
    for (size_t j = 0; j < order.size(); ++j) {
      if (j == 0 || index[order[j]] != index[order[j - 1]]) {
        rows->grad.push_back(sums + sum.runs.size() * row *
                                        SizeOf(NumberOf(sum_dtype_)));
        sum.runs.push_back({sum.runs.size(), {}});
      }
      sum.runs.back().grads.push_back(order[j]);
    }
    return wrapopt::SumRowsOnGpu(ctx, sum);
  }

  // ApplyRows of all variables. A row, or several that follow each other, are to
  // the launcher what a variable is.
  absl::Status ApplyRowsOnGpu(OpKernelContext* ctx, Variables* variables,
                              const std::vector<int>& states,
                              const std::vector<Rows>& rows,
                              const std::vector<double>& scalars) const {
    const size_t bytes = SizeOf(NumberOf(dtype_));
    for (const bool summed : {false, true}) {
      Pass pass;
      pass.AddStage({summed ? sum_step_ : step_, scalars.data(),
                     static_cast<int>(states.size()) + 1, 0,
                     /*new_inputs=*/true});
      std::vector<void*> operands(states.size() + 1);
      for (size_t i = 0; i < rows.size(); ++i) {
        const Tensor& value = *variables->tensor(states[0] + i);
        if (rows[i].summed != summed || value.NumElements() == 0) continue;
        const int64_t row = value.NumElements() / value.dim_size(0);
        auto add = [&](const void* grad, int64_t begin, int64_t end) {
          for (size_t s = 0; s < states.size(); ++s) {
            operands[s] = static_cast<char*>(variables->data(states[s] + i)) +
                          begin * row * bytes;
          }
          operands.back() = const_cast<void*>(grad);
          pass.AddVariable((end - begin) * row, operands);
        };
        const std::vector<int64_t>& index = rows[i].index;
        const std::vector<const void*>& grad = rows[i].grad;
        const int64_t grad_bytes =
            row * SizeOf(NumberOf(summed ? sum_dtype_ : grad_dtype_));
        auto follows = [&](size_t u) {
          return index[u] == index[u - 1] + 1 &&
                 static_cast<const char*>(grad[u]) -
                         static_cast<const char*>(grad[u - 1]) ==
                     grad_bytes;
        };
        int64_t next = 0;
        for (size_t u = 0; u < index.size();) {
          // Rows that follow each other, as do their gradients, are as one.
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
      }
      TF_RETURN_IF_ERROR(RunPassOnGpu(ctx, pass));
    }
    return absl::OkStatus();
  }

  // To the launcher, an array of zeros.
  static constexpr const void* kZeros = nullptr;

  void ApplyRows(OpKernelContext* ctx, Variables* variables,
                 const std::vector<int>& states, int i, const Rows& rows,
                 const std::vector<double>& scalars) const {
    const Tensor& value = *variables->tensor(states[0] + i);
    if (value.NumElements() == 0) return;
    const int64_t row = value.NumElements() / value.dim_size(0);
    const size_t bytes = SizeOf(NumberOf(dtype_));
    const StepFn step = rows.summed ? sum_step_.loop : step_.loop;

    // Takes the step for elements [begin, end) of the variable.
    auto apply = [&](const void* grad, int64_t begin, int64_t end) {
      std::vector<void*> operands;
      operands.reserve(states.size() + 1);
      for (const int state : states) {
        operands.push_back(static_cast<char*>(variables->data(state + i)) +
                           begin * bytes);
      }
      operands.push_back(const_cast<void*>(grad));
      step(operands.data(), scalars.data(), 0, end - begin, Ahead());
    };
    const int64_t cycles_per_row = 50 + row * bytes * states.size() / 4;
    if (rule_.sparse == Sparse::kRows) {
      RunParallel(ctx, rows.index.size(), cycles_per_row,
                  [&](int64_t begin, int64_t end) {
                    for (int64_t u = begin; u < end; ++u) {
                      apply(rows.grad[u], rows.index[u] * row,
                            (rows.index[u] + 1) * row);
                    }
                  });
      return;
    }
    // Rows without a gradient have gradient zero.
    constexpr int64_t kZerosSize = 4096;
    static constexpr double kZeros[kZerosSize] = {};
    RunParallel(
        ctx, value.dim_size(0), cycles_per_row,
        [&](int64_t begin, int64_t end) {
          auto zeros = [&](int64_t from, int64_t to) {
            for (; from < to; from += kZerosSize) {
              apply(kZeros, from, std::min(to, from + kZerosSize));
            }
          };
          int64_t next = begin;
          auto u = std::lower_bound(rows.index.begin(), rows.index.end(),
                                    begin) -
                   rows.index.begin();
          for (; u < static_cast<int64_t>(rows.index.size()) &&
                 rows.index[u] < end;
               ++u) {
            zeros(next * row, rows.index[u] * row);
            apply(rows.grad[u], rows.index[u] * row,
                  (rows.index[u] + 1) * row);
            next = rows.index[u] + 1;
          }
          zeros(next * row, end * row);
        });
  }

  const RuleInfo& rule_;
  const bool sparse_;
  Variables::Memory memory_;
  Averages averages_;
  ApplyContract contract_;
  Variables::Access access_;
  tensorflow::DataType dtype_;
  tensorflow::DataType grad_dtype_;
  tensorflow::DataType sum_dtype_;
  RuleStep step_;
  RuleStep sum_step_;
};

template <int kRule, bool kSparse>
class ApplyOpOf : public ApplyOp {
 public:
  explicit ApplyOpOf(OpKernelConstruction* ctx)
      : ApplyOp(ctx, kRules[kRule], kSparse) {}
};

// What the kernel reads itself lies in the host's memory, that of a sparse
// gradient's rows too: their numbers are checked.
void KeepOnHost(const RuleInfo& rule, bool sparse, bool ref,
                tensorflow::KernelDefBuilder* kernel) {
  for (const char* name : {"decays", "accept"}) kernel->HostMemory(name);
  if (sparse) kernel->HostMemory("indices");
  for (const absl::string_view name : absl::StrSplit(rule.scalars, ' ')) {
    if (absl::EndsWith(name, "?")) continue;
    kernel->HostMemory(std::string(name).c_str());
  }
  if (ref) return;
  kernel->HostMemory("shadows");
  for (const absl::string_view name : absl::StrSplit(rule.states, ' ')) {
    kernel->HostMemory(std::string(name).c_str());
  }
}

template <int kRule, bool kSparse>
void Register() {
  for (const bool ref : {false, true}) {
    const std::string name =
        absl::StrCat("Wrapopt>", kSparse ? "Sparse" : "", "Apply",
                     kRules[kRule].name, ref ? "Ref" : "");
    for (const char* device :
         {tensorflow::DEVICE_CPU, tensorflow::DEVICE_GPU}) {
      tensorflow::KernelDefBuilder kernel(name.c_str());
      kernel.Device(device);
      if (device == tensorflow::DEVICE_GPU) {
        KeepOnHost(kRules[kRule], kSparse, ref, &kernel);
      }
      // Lives as long as the process, as every registration does.
      new tensorflow::kernel_factory::OpKernelRegistrar(
          kernel.Build(), name, [](OpKernelConstruction* ctx) -> OpKernel* {
            return new ApplyOpOf<kRule, kSparse>(ctx);
          });
    }
  }
}

template <int... rules>
bool RegisterAll(std::integer_sequence<int, rules...>) {
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

const bool registered =
    RegisterAll(std::make_integer_sequence<int, std::size(kRules)>());

}  // namespace
}  // namespace wrapopt
