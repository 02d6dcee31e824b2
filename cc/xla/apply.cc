#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "cc/ops/apply.h"
#include "cc/ops/contracts.h"
#include "cc/rules/rules.h"
#include "cc/xla/averages.h"
#include "cc/xla/custom_call.h"
#include "cc/xla/elementwise.h"
#include "cc/xla/ffi_handlers.h"
#include "cc/xla/inputs.h"
#include "cc/xla/registration.h"
#include "cc/xla/variables.h"
#include "tensorflow/compiler/tf2xla/xla_op_kernel.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "xla/hlo/builder/xla_builder.h"
#include "xla/xla_data.pb.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::XlaOpKernel;
using tensorflow::XlaOpKernelContext;
using xla::XlaOp;

class ApplyXlaOp : public XlaOpKernel {
 public:
  explicit ApplyXlaOp(OpKernelConstruction* ctx) : XlaOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, averages_.Init(ctx));
    OP_REQUIRES_OK(ctx, contract_.Init(ctx, averages_));
    type_ = XlaType(contract_.dtype());
    compute_ = ComputeType(type_);
  }

  void Compile(XlaOpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckScalar("accept", ctx->InputShape("accept")));
    In in;
    if (const std::optional<Tensor> known = Constant(ctx, "accept")) {
      if (!known->scalar<bool>()()) return;
    } else {
      in.accept = ctx->Input("accept");
    }
    OP_REQUIRES_OK(ctx, ReadScalars(ctx, &in));
    OP_REQUIRES_OK(ctx, averages_.ReadDecays(ctx, &in.rates));

    XlaVariables variables(ctx);
    OP_REQUIRES_OK(ctx, variables.Find(contract_.Lists(averages_)));
    OP_REQUIRES_OK(ctx, contract_.CheckVariables(variables, averages_));
    averages_.ShapeLogDecays(&variables, contract_.log_decays(averages_),
                             /*values=*/0);
    if (averages_.lazy()) {
      OP_REQUIRES_OK(ctx, averages_.ReadLogs(ctx, &in.logs));
    }
    OP_REQUIRES_OK(ctx, ReadGradients(ctx, variables, &in));

    Calls calls;
    OP_REQUIRES_OK(ctx, CallsKernels(ctx, &calls));
    if (calls == Calls::kCpu) {
      OP_REQUIRES_OK(ctx, Call(ctx, in, &variables));
      return;
    }
    std::vector<int> called;
    for (int i = 0; i < contract_.variables(); ++i) {
      if (calls == Calls::kGpu && !contract_.sparse() &&
          variables.shape(i).num_elements() <= kMostElementsOfGpuCall) {
        called.push_back(i);
      } else {
        OP_REQUIRES_OK(ctx, Build(in, i, &variables));
      }
    }
    if (!called.empty()) {
      OP_REQUIRES_OK(ctx, CallOnGpu(ctx, in, called, &variables));
    }
  }

 private:
  // The op's inputs beside the variables.
  struct In {
    std::optional<XlaOp> accept;  // No value if it is known to be true.
    std::vector<XlaOp> scalars;   // In the compute type.
    std::vector<XlaOp> rates, logs;  // Of the averages.
    Inputs grads, indices;
  };

  absl::Status ReadScalars(XlaOpKernelContext* ctx, In* in) const {
    TF_RETURN_IF_ERROR(contract_.CheckScalars(ctx->InputShape("scalars")));
    const std::optional<Tensor> known = Constant(ctx, "scalars");
    for (int c = 0; c < contract_.scalars(); ++c) {
      in->scalars.push_back(
          known ? Scalar(ctx, compute_, known->vec<double>()(c))
                : xla::ConvertElementType(Element(ctx->Input("scalars"), c),
                                          compute_));
    }
    return absl::OkStatus();
  }

  absl::Status ReadGradients(XlaOpKernelContext* ctx,
                             const XlaVariables& variables, In* in) const {
    TF_RETURN_IF_ERROR(ReadInputs(ctx, "grad", &in->grads));
    TF_RETURN_IF_ERROR(ReadInputs(ctx, "indices", &in->indices));
    const bool sparse = contract_.sparse();
    // A sparse gradient may have a dynamic number of rows.
    const int first_dimension = sparse ? 1 : 0;
    for (int i = 0; i < contract_.variables(); ++i) {
      const TensorShape& shape = in->grads.shapes[i];
      TF_RETURN_IF_ERROR(
          sparse ? contract_.CheckRows(variables, i, shape,
                                       in->indices.shapes[i])
                 : variables.CheckSameShape(shape, "grad", i, i));
      TF_RETURN_IF_ERROR(
          CheckStatic("grad", i, in->grads.ops[i], first_dimension));
    }
    return absl::OkStatus();
  }

  // Builds the step of variable `i` as plain HLO.
  absl::Status Build(const In& in, int i, XlaVariables* all) const {
    XlaVariables& variables = *all;
    const Sparse rows_of_rule = contract_.rule().sparse;
    std::vector<XlaOp> states;
    for (int s = 0; s < contract_.states(); ++s) {
      states.push_back(variables.value(contract_.state(s) + i));
    }
    // A scatter of some rows is in place. A select of whole arrays, to accept a
    // step, would copy them. So the rows of a step that is not accepted do not
    // count, if the step changes nothing else.
    bool accepts_rows = false;
    std::optional<Rows> rows;
    std::vector<XlaOp> caught_up, old_logs;
    if (!contract_.sparse()) {
      StepOfAll(in, in.grads.ops[i], &states);
    } else if (variables.shape(i).num_elements() > 0) {
      rows.emplace(type_, variables.shape(i).dim_sizes(), in.grads.ops[i],
                   in.indices.ops[i]);
      accepts_rows = rows_of_rule == Sparse::kRows;
      if (in.accept && accepts_rows) rows->Keep(*in.accept);
      if (rows_of_rule == Sparse::kAll) {
        StepOfAll(in, rows->Dense(), &states);
      } else {
        const XlaOp value = states[0];
        const XlaOp old = averages_.lazy() ? rows->Old(value)
                                           : rows->Get(value);
        for (int k = 0; averages_.lazy() && k < averages_.per_value(); ++k) {
          old_logs.push_back(rows->OldLogs(variables.value(LogDecay(k, i))));
          caught_up.push_back(rows->CaughtUp(
              variables.value(Shadow(k, i)), XlaType(averages_.shadow_dtype()),
              old, old_logs.back()));
        }
        rows->Step(contract_.rule().id, absl::MakeSpan(states), in.scalars,
                   old);
      }
    }

    // Not a product: a step that is not accepted may hold infinity or NaN.
    const auto accepted = [&](XlaOp value, int variable, bool rows_count) {
      return in.accept && !rows_count
                 ? xla::Select(*in.accept, value, variables.value(variable))
                 : value;
    };
    for (size_t s = 0; s < states.size(); ++s) {
      const int at = contract_.state(s) + i;
      TF_RETURN_IF_ERROR(
          variables.Assign(at, accepted(states[s], at, accepts_rows)));
    }
    const XlaOp value = Stored(states[0], type_);
    for (int k = 0; k < averages_.per_value(); ++k) {
      const int shadow = Shadow(k, i), log = LogDecay(k, i);
      if (!averages_.lazy()) {
        const XlaOp updated = averages_.Updated(variables.value(shadow), value,
                                                in.rates[k]);
        TF_RETURN_IF_ERROR(variables.Assign(
            shadow, accepted(updated, shadow, /*rows_count=*/false)));
        continue;
      }
      if (!rows) {  // The variable has no element.
        TF_RETURN_IF_ERROR(variables.Assign(log, variables.value(log)));
        continue;
      }
      const XlaOp moved = averages_.Updated(caught_up[k], rows->Get(value),
                                            in.rates[k]);
      TF_RETURN_IF_ERROR(variables.Assign(
          shadow, rows->Put(variables.value(shadow), moved)));
      TF_RETURN_IF_ERROR(variables.Assign(
          log, rows->Marked(variables.value(log), old_logs[k], in.logs[k])));
    }
    return absl::OkStatus();
  }

  void StepOfAll(const In& in, XlaOp grad, std::vector<XlaOp>* states) const {
    Step(contract_.rule().id, type_, absl::MakeSpan(*states), {grad},
         in.scalars);
  }

  // Calls the CPU kernel.
  absl::Status Call(XlaOpKernelContext* ctx, const In& in,
                    XlaVariables* variables) const {
    xla::XlaBuilder* builder = ctx->builder();
    const int n = contract_.variables();
    const bool sparse = contract_.sparse();
    const std::string rule = RuleAttribute();
    for (int first = 0, end; first < n; first = end) {
      end = sparse ? n : EndOfCall(*variables, first);
      const int count = end - first;
      KernelCall call(variables);
      call.Read(ctx->Input("accept"));
      call.Read(ctx->Input("decays"));
      call.Read(ctx->Input("scalars"));
      if (sparse) call.Read(Counts(builder, in.indices.ops));
      for (int s = 0; s < contract_.states(); ++s) {
        call.Write(contract_.state(s) + first, count);
      }
      for (int k = 0; k < averages_.per_value(); ++k) {
        call.Write(Shadow(k, first), count);
      }
      if (averages_.lazy()) {
        call.Write(contract_.log_decays(averages_), averages_.count());
      }
      for (int i = first; i < end; ++i) {
        call.Read(sparse ? Padded(in.grads.ops[i]) : in.grads.ops[i]);
      }
      for (const XlaOp of_variable : in.indices.ops) {
        call.Read(Padded(of_variable));
      }
      TF_RETURN_IF_ERROR(
          sparse ? call.Emit(builder, kSparseApplyCall,
                             absl::StrCat("{", rule, ", names = ",
                                          Names(*variables, 0, n), "}"))
                 : call.Emit(builder, kApplyCall,
                             absl::StrCat("{", rule, "}")));
    }
    return absl::OkStatus();
  }

  // Calls the GPU kernel for some variables.
  absl::Status CallOnGpu(XlaOpKernelContext* ctx, const In& in,
                         const std::vector<int>& called,
                         XlaVariables* variables) const {
    KernelCall call(variables);
    call.Read(ctx->Input("accept"));
    call.Read(GpuNumbers(ctx->Input("scalars"), ctx->Input("decays")));
    for (int s = 0; s < contract_.states(); ++s) {
      for (const int i : called) call.Write(contract_.state(s) + i, 1);
    }
    for (int k = 0; k < averages_.per_value(); ++k) {
      for (const int i : called) call.Write(Shadow(k, i), 1);
    }
    for (const int i : called) call.Read(in.grads.ops[i]);
    return call.Emit(ctx->builder(), kGpuUpdateCall,
                     absl::StrCat("{", RuleAttribute(), "}"));
  }

  std::string RuleAttribute() const {
    return absl::StrCat("rule = ", Quoted(contract_.rule().name));
  }

  // The end of the variables, from `first` on, that one call steps. Gradients
  // of one call are in memory at once. If a program needs more than 32 MB, XLA
  // gets them from the system in each step, which costs more than some calls.
  int EndOfCall(const XlaVariables& variables, int first) const {
    int end = first;
    int64_t bytes = 0;
    do {
      bytes += variables.shape(end).num_elements() *
               tensorflow::DataTypeSize(contract_.dtype());
      ++end;
    } while (end < contract_.variables() && bytes < kBytesOfCall);
    return end;
  }

  // The positions of average `k` of variable `i`, and of its log decays.
  int Shadow(int k, int i) const {
    return contract_.shadows() + k * averages_.values() + i;
  }
  int LogDecay(int k, int i) const {
    return contract_.log_decays(averages_) + k * averages_.values() + i;
  }

  static constexpr int64_t kBytesOfCall = 1 << 20;

  XlaAverages averages_;
  ApplyContract contract_;
  xla::PrimitiveType type_, compute_;
};

const bool apply_registered = RegisterXlaKernel<ApplyXlaOp>("Wrapopt>Apply");

}  // namespace
}  // namespace wrapopt
