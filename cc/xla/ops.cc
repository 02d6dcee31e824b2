// The ops' kernels for XLA. They build operations of the program that a CPU,
// GPU or TPU runs.
//
// On a CPU, an op is a call of its CPU kernel. On other devices it is plain
// HLO, which does not check values known only at run time, such as a decay or
// an index that is not a constant. There, the formula is applied to a decay,
// rate or weight out of range, and an index out of range is ignored.
#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "cc/ops/contracts.h"
#include "cc/rules/rules.h"
#include "cc/xla/custom_call.h"
#include "cc/xla/elementwise.h"
#include "cc/xla/ffi_handlers.h"
#include "cc/xla/registration.h"
#include "cc/xla/variables.h"
#include "tensorflow/compiler/tf2xla/type_util.h"
#include "tensorflow/compiler/tf2xla/xla_op_kernel.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "xla/hlo/builder/lib/constants.h"
#include "xla/hlo/builder/lib/slicing.h"
#include "xla/hlo/builder/xla_builder.h"
#include "xla/shape.h"
#include "xla/xla_data.pb.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::XlaOpKernel;
using tensorflow::XlaOpKernelContext;
using xla::XlaOp;
using Access = XlaVariables::Access;

// The XLA type of a dtype that the ops' attributes allow.
xla::PrimitiveType XlaType(tensorflow::DataType dtype) {
  xla::PrimitiveType type = xla::PRIMITIVE_TYPE_INVALID;
  tensorflow::DataTypeToPrimitiveType(dtype, &type).IgnoreError();
  return type;
}

// The value of an input that is known when the computation is built.
std::optional<Tensor> Known(XlaOpKernelContext* ctx, const char* name) {
  return ctx->InputExpression(name).constant_value();
}

XlaOp Scalar(XlaOpKernelContext* ctx, xla::PrimitiveType type, double value) {
  return xla::ConstantR0WithType(ctx->builder(), type, value);
}

// Element `i` of a vector.
XlaOp Element(XlaOp vector, int64_t i) {
  return xla::Reshape(xla::SliceInDim(vector, i, i + 1, 1, 0), {});
}

// Scalars of one type as a vector.
XlaOp Vector(xla::XlaBuilder* builder, std::vector<XlaOp> scalars) {
  for (XlaOp& scalar : scalars) scalar = xla::Reshape(scalar, {1});
  return xla::ConcatInDim(builder, scalars, 0);
}

// An input list of rows of N tensors of one dtype. `shapes` has the bounds of a
// tensor of bounded dynamic shape.
struct Inputs {
  std::vector<XlaOp> ops;
  std::vector<TensorShape> shapes;
};

absl::Status ReadInputs(XlaOpKernelContext* ctx, const char* list,
                        Inputs* inputs) {
  return ctx->InputList(list, &inputs->ops, &inputs->shapes);
}

// A tensor that is combined with a whole variable must have a static shape.
absl::Status CheckStatic(const char* list, int position, XlaOp tensor,
                         int first_dimension = 0) {
  TF_ASSIGN_OR_RETURN(const xla::Shape shape,
                      tensor.builder()->GetShape(tensor));
  for (int d = first_dimension; d < shape.dimensions_size(); ++d) {
    if (!shape.is_dynamic_dimension(d)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        list, "[", position, "] must have a shape that is known at compile ",
        "time, got ", shape.ToString(),
        ": compute it outside of the compiled function"));
  }
  return absl::OkStatus();
}

// An array of dynamic size, padded to its bound.
XlaOp Padded(XlaOp array) {
  const bool dynamic =
      array.builder()->GetShape(array).value().is_dynamic_dimension(0);
  return dynamic ? xla::RemoveDynamicDimension(array, 0) : array;
}

// The numbers of indices that count in each of several vectors, as int64.
XlaOp Counts(xla::XlaBuilder* builder, const std::vector<XlaOp>& indices) {
  std::vector<XlaOp> counts;
  for (const XlaOp of_variable : indices) {
    counts.push_back(xla::ConvertElementType(
        xla::GetDimensionSize(of_variable, 0), xla::S64));
  }
  return counts.empty() ? xla::ConstantR1<int64_t>(builder, {})
                        : Vector(builder, counts);
}

// The names of `count` variables in errors, separated by zero bytes.
std::string Names(const XlaVariables& variables, int first, int count) {
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) {
    names.push_back(variables.Describe(first + i));
  }
  return Quoted(absl::StrJoin(names, std::string(1, '\0')));
}

// The averages of EmaUpdate and Apply.
class XlaAverages : public ShadowContract {
 public:
  // The input "decays" as rates, in the shadows' compute type.
  absl::Status ReadDecays(XlaOpKernelContext* ctx,
                          std::vector<XlaOp>* rates) const {
    const xla::PrimitiveType type = ComputeType(XlaType(shadow_dtype()));
    if (const std::optional<Tensor> decays = Known(ctx, "decays")) {
      std::vector<double> known;
      TF_RETURN_IF_ERROR(ToRates(*decays, &known));
      for (const double rate : known) {
        rates->push_back(Scalar(ctx, type, rate));
      }
      return absl::OkStatus();
    }
    TF_RETURN_IF_ERROR(CheckDecays(ctx->InputShape("decays")));
    const XlaOp decays = ctx->Input("decays");
    for (int k = 0; k < per_value(); ++k) {
      const XlaOp decay = Element(decays, k);
      rates->push_back(xla::ConvertElementType(
          xla::ScalarLike(decay, 1.0) - decay, type));
    }
    return absl::OkStatus();
  }

  // The input "decays" as logarithms, in double.
  absl::Status ReadLogs(XlaOpKernelContext* ctx,
                        std::vector<XlaOp>* logs) const {
    const std::optional<Tensor> known = Known(ctx, "decays");
    for (int k = 0; k < per_value(); ++k) {
      if (known) {
        logs->push_back(Scalar(ctx, xla::F64, LogOf(known->vec<double>()(k))));
        continue;
      }
      const XlaOp decay = Element(ctx->Input("decays"), k);
      logs->push_back(
          xla::Max(xla::Log(decay), xla::ScalarLike(decay, LogOf(0))));
    }
    return absl::OkStatus();
  }

  // Sets the shapes of log decays without a value.
  void ShapeLogDecays(XlaVariables* variables, int log_decays,
                      int values) const {
    for (int at = 0; lazy() && at < count(); ++at) {
      const int value = values + at % this->values();
      variables->SetShape(
          log_decays + at,
          {variables->shape(value).dim_size(0) + kMoreLogDecays});
    }
  }

  // The new value of `shadow`, an average of `value`.
  XlaOp Updated(XlaOp shadow, XlaOp value, XlaOp rate) const {
    Step(RuleId::kEma, XlaType(shadow_dtype()), absl::MakeSpan(&shadow, 1),
         {value}, {rate});
    return shadow;
  }
};

class EmaUpdateXlaOp : public XlaOpKernel {
 public:
  explicit EmaUpdateXlaOp(OpKernelConstruction* ctx) : XlaOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, averages_.Init(ctx));
  }

  void Compile(XlaOpKernelContext* ctx) override {
    std::vector<XlaOp> rates;
    OP_REQUIRES_OK(ctx, averages_.ReadDecays(ctx, &rates));
    XlaVariables variables(ctx);
    const int shadows = 0, values = averages_.count();
    OP_REQUIRES_OK(ctx, variables.Find(averages_.Lists()));
    OP_REQUIRES_OK(ctx, averages_.Check(variables, shadows, values));

    bool calls;
    OP_REQUIRES_OK(ctx, CallsKernels(ctx, &calls));
    if (calls) {
      KernelCall call(&variables);
      call.Read(ctx->Input("decays"));
      call.Write(shadows, values - shadows);
      for (int i = 0; i < averages_.values(); ++i) {
        call.Read(variables.value(values + i));
      }
      OP_REQUIRES_OK(ctx, call.Emit(ctx->builder(), kEmaUpdateCall));
      return;
    }
    for (int k = 0; k < averages_.per_value(); ++k) {
      for (int i = 0; i < averages_.values(); ++i) {
        const int shadow = shadows + k * averages_.values() + i;
        OP_REQUIRES_OK(ctx, variables.Assign(
                                shadow, averages_.Updated(
                                            variables.value(shadow),
                                            variables.value(values + i),
                                            rates[k])));
      }
    }
  }

 private:
  XlaAverages averages_;
};

// Wrapopt>CatchUp, Wrapopt>ReadAverages and Wrapopt>SparseEmaUpdate.
class LazyAveragesXlaOp : public XlaOpKernel {
 public:
  enum class Kind { kCatchUp, kRead, kStep };

  LazyAveragesXlaOp(OpKernelConstruction* ctx, Kind kind)
      : XlaOpKernel(ctx),
        is_step_(kind == Kind::kStep),
        is_read_(kind == Kind::kRead) {
    OP_REQUIRES_OK(ctx, averages_.Init(ctx));
  }

  void Compile(XlaOpKernelContext* ctx) override {
    std::vector<XlaOp> rates, logs;
    if (is_step_) {
      OP_REQUIRES_OK(ctx, averages_.ReadDecays(ctx, &rates));
      OP_REQUIRES_OK(ctx, averages_.ReadLogs(ctx, &logs));
    }
    XlaVariables variables(ctx);
    int shadows, values, log_decays;
    OP_REQUIRES_OK(ctx, variables.Find("shadows", Access::kWrite, &shadows));
    OP_REQUIRES_OK(ctx, variables.Find("values", Access::kRead, &values));
    OP_REQUIRES_OK(ctx, averages_.Check(variables, shadows, values));
    OP_REQUIRES_OK(ctx, variables.FindOrMake("log_decays",
                                             tensorflow::DT_DOUBLE,
                                             &log_decays));
    OP_REQUIRES_OK(ctx,
                   averages_.CheckLogDecays(variables, log_decays, values));
    averages_.ShapeLogDecays(&variables, log_decays, values);
    Inputs indices;
    if (!is_read_) OP_REQUIRES_OK(ctx, ReadInputs(ctx, "indices", &indices));
    for (size_t i = 0; i < indices.shapes.size(); ++i) {
      OP_REQUIRES_OK(ctx, CheckIndices(i, indices.shapes[i]));
    }
    OP_REQUIRES_OK(ctx, Run(ctx, &variables, shadows, values, log_decays, rates,
                            logs, indices));
    for (int i = 0; is_read_ && i < ctx->num_outputs(); ++i) {
      ctx->SetOutput(i, variables.assigned(shadows + i));
    }
  }

 private:
  absl::Status Run(XlaOpKernelContext* ctx, XlaVariables* all, int shadows,
                   int values, int log_decays, const std::vector<XlaOp>& rates,
                   const std::vector<XlaOp>& logs,
                   const Inputs& indices) const {
    XlaVariables& variables = *all;
    const int n = averages_.values();
    bool calls;
    TF_RETURN_IF_ERROR(CallsKernels(ctx, &calls));
    if (calls) {
      KernelCall call(all);
      call.Read(is_step_ ? ctx->Input("decays")
                         : xla::ConstantR1<double>(ctx->builder(), {}));
      call.Read(Counts(ctx->builder(), indices.ops));
      call.Write(shadows, averages_.per_value() * n);
      call.Write(log_decays, averages_.per_value() * n);
      for (int i = 0; i < n; ++i) call.Read(variables.value(values + i));
      for (const XlaOp of_value : indices.ops) call.Read(Padded(of_value));
      return call.Emit(ctx->builder(), kMoveRowsCall,
                       absl::StrCat("{n = ", n, " : i64, names = ",
                                    Names(variables, values, n), "}"));
    }
    const xla::PrimitiveType type = XlaType(averages_.shadow_dtype());
    for (int i = 0; i < n; ++i) {
      const XlaOp value = variables.value(values + i);
      const TensorShape& shape = variables.shape(values + i);
      for (int k = 0; k < averages_.per_value(); ++k) {
        const int shadow = shadows + k * n + i, log = log_decays + k * n + i;
        const XlaOp before = variables.value(shadow);
        if (indices.ops.empty()) {
          TF_RETURN_IF_ERROR(variables.Assign(
              shadow, CaughtUp(before, type, value, variables.value(log))));
          TF_RETURN_IF_ERROR(
              variables.Assign(log, xla::ZerosLike(variables.value(log))));
          continue;
        }
        if (shape.num_elements() == 0) continue;
        const Rows rows(type, shape.dim_sizes(), indices.ops[i]);
        const XlaOp of_rows = rows.Get(value);
        const XlaOp old_logs = rows.OldLogs(variables.value(log));
        XlaOp moved = rows.CaughtUp(before, type, of_rows, old_logs);
        if (is_step_) moved = averages_.Updated(moved, of_rows, rates[k]);
        TF_RETURN_IF_ERROR(variables.Assign(shadow, rows.Put(before, moved)));
        TF_RETURN_IF_ERROR(variables.Assign(
            log, rows.Marked(variables.value(log), old_logs,
                             is_step_ ? logs[k] : Scalar(ctx, xla::F64, 0))));
      }
    }
    return absl::OkStatus();
  }

  const bool is_step_;
  const bool is_read_;
  XlaAverages averages_;
};

template <LazyAveragesXlaOp::Kind kKind>
class LazyAveragesXlaOpOf : public LazyAveragesXlaOp {
 public:
  explicit LazyAveragesXlaOpOf(OpKernelConstruction* ctx)
      : LazyAveragesXlaOp(ctx, kKind) {}
};

// Compensates gradients for their age: see cc/rules/compensation.h.
class XlaCompensation {
 public:
  // `type` is the compute type, which the policy's scalars have.
  XlaCompensation(const PolicyInfo& policy, xla::PrimitiveType type,
                  absl::Span<const XlaOp> scalars)
      : policy_(policy), type_(type), scalars_(scalars) {}

  // The gradient that the step takes. `memory` are the policy's states of the
  // variable, or rows of them.
  XlaOp Before(XlaOp var, XlaOp origin, XlaOp grad,
               std::vector<XlaOp>* memory) const {
    std::vector<XlaOp> states = *memory;
    states.push_back(xla::ConvertElementType(var, type_) -
                     xla::ConvertElementType(origin, type_));
    Step(policy_.rule, type_, absl::MakeSpan(states), {grad},
         scalars_.first(policy_.scalars_before()));
    std::copy_n(states.begin(), memory->size(), memory->begin());
    return states.back();
  }

  // Measures the step from `before` to `after`.
  void After(XlaOp before, XlaOp after, std::vector<XlaOp>* memory) const {
    if (!policy_.measures) return;
    XlaOp states[] = {(*memory)[0], xla::ConvertElementType(before, type_)};
    Step(RuleId::kStepSize, type_, absl::MakeSpan(states), {after},
         {scalars_.back()});
    (*memory)[0] = states[0];
  }

 private:
  const PolicyInfo& policy_;
  const xla::PrimitiveType type_;
  const absl::Span<const XlaOp> scalars_;
};

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
    // No value if it is known to be true.
    std::optional<XlaOp> accept;
    if (const std::optional<Tensor> known = Known(ctx, "accept")) {
      if (!known->scalar<bool>()()) return;
    } else {
      accept = ctx->Input("accept");
    }
    std::vector<XlaOp> all_scalars, rates;
    OP_REQUIRES_OK(ctx, ReadScalars(ctx, &all_scalars));
    OP_REQUIRES_OK(ctx, averages_.ReadDecays(ctx, &rates));
    const absl::Span<const XlaOp> scalars =
        absl::MakeConstSpan(all_scalars).first(contract_.rule_scalars());
    std::optional<XlaCompensation> compensation;
    if (contract_.policy() != nullptr) {
      compensation.emplace(
          *contract_.policy(), compute_,
          absl::MakeConstSpan(all_scalars).subspan(scalars.size()));
    }

    XlaVariables variables(ctx);
    const int shadows = contract_.shadows();
    const int log_decays = contract_.log_decays(averages_);
    OP_REQUIRES_OK(ctx, variables.Find(contract_.Lists(averages_)));
    OP_REQUIRES_OK(ctx, contract_.CheckVariables(variables, averages_));
    averages_.ShapeLogDecays(&variables, log_decays, /*values=*/0);
    std::vector<XlaOp> logs;
    if (averages_.lazy()) OP_REQUIRES_OK(ctx, averages_.ReadLogs(ctx, &logs));
    Inputs grads, indices, origins;
    OP_REQUIRES_OK(ctx, ReadInputs(ctx, "grad", &grads));
    OP_REQUIRES_OK(ctx, ReadInputs(ctx, "indices", &indices));
    OP_REQUIRES_OK(ctx, ReadInputs(ctx, "origins", &origins));
    // A sparse gradient may have a dynamic number of rows.
    const bool sparse = contract_.sparse();
    const int first_dimension = sparse ? 1 : 0;
    for (int i = 0; i < contract_.variables(); ++i) {
      OP_REQUIRES_OK(
          ctx, sparse
                   ? contract_.CheckRows(variables, i, grads.shapes[i],
                                         indices.shapes[i])
                   : variables.CheckSameShape(grads.shapes[i], "grad", i, i));
      OP_REQUIRES_OK(ctx,
                     CheckStatic("grad", i, grads.ops[i], first_dimension));
      if (!compensation) continue;
      OP_REQUIRES_OK(ctx, contract_.CheckOrigins(i, origins.shapes[i],
                                                 grads.shapes[i]));
      OP_REQUIRES_OK(
          ctx, CheckStatic("origins", i, origins.ops[i], first_dimension));
    }

    bool calls;
    OP_REQUIRES_OK(ctx, CallsKernels(ctx, &calls));
    if (calls && !compensation) {
      OP_REQUIRES_OK(ctx, Call(ctx, &variables, grads.ops, indices.ops));
      return;
    }
    const RuleInfo& rule = contract_.rule();
    for (int i = 0; i < contract_.variables(); ++i) {
      const TensorShape& shape = variables.shape(i);
      std::vector<XlaOp> after;
      for (int s = 0; s < contract_.rule_states(); ++s) {
        after.push_back(variables.value(contract_.state(s) + i));
      }
      // Not a product: a step that is not accepted may hold infinity or NaN.
      auto accepted = [&](XlaOp value, int variable) {
        return accept
                   ? xla::Select(*accept, value, variables.value(variable))
                   : value;
      };
      bool is_step_accepted = false;
      std::optional<Rows> moved;  // The rows that the averages move in.
      std::vector<XlaOp> caught_up, old_logs;
      std::vector<XlaOp> of_policy;  // The policy's states, after the step.
      for (int m = 0; m < contract_.memory_states(); ++m) {
        of_policy.push_back(variables.value(contract_.memory(m) + i));
      }
      if (!sparse) {
        XlaOp grad = grads.ops[i];
        if (compensation) {
          grad = compensation->Before(after[0], origins.ops[i], grad,
                                      &of_policy);
        }
        const XlaOp before = after[0];
        Step(rule.id, type_, absl::MakeSpan(after), {grad}, scalars);
        if (compensation) {
          compensation->After(before, Stored(after[0], type_), &of_policy);
        }
      } else if (shape.num_elements() > 0) {
        Rows rows(type_, shape.dim_sizes(), grads.ops[i], indices.ops[i]);
        if (compensation && accept) rows.Keep(*accept);
        if (rule.sparse == Sparse::kAll && compensation) {
          const Rows::Sums sums = rows.Sum();
          const XlaOp before = rows.Get(sums, after[0]);
          std::vector<XlaOp> of_rows;
          for (const XlaOp& state : of_policy) {
            of_rows.push_back(rows.Get(sums, state));
          }
          const XlaOp grad =
              compensation->Before(
                  before, rows.OfSums(sums, Padded(origins.ops[i])), sums.grad,
                  &of_rows);
          Step(rule.id, type_, absl::MakeSpan(after),
               {rows.Dense(sums, grad)}, scalars);
          compensation->After(before,
                              rows.Get(sums, Stored(after[0], type_)),
                              &of_rows);
          for (size_t m = 0; m < of_policy.size(); ++m) {
            of_policy[m] = rows.Put(sums, of_policy[m], of_rows[m]);
          }
        } else if (rule.sparse == Sparse::kAll) {
          Step(rule.id, type_, absl::MakeSpan(after), {rows.Dense()},
               scalars);
        } else {
          // A scatter of some rows is in place. A select of whole arrays would
          // copy them.
          if (accept && !compensation) rows.Keep(*accept);
          const XlaOp old =
              averages_.lazy() ? rows.Old(after[0]) : rows.Get(after[0]);
          for (int k = 0; averages_.lazy() && k < averages_.per_value(); ++k) {
            const int at = k * averages_.values() + i;
            old_logs.push_back(rows.OldLogs(variables.value(log_decays + at)));
            caught_up.push_back(rows.CaughtUp(
                variables.value(shadows + at),
                XlaType(averages_.shadow_dtype()), old, old_logs.back()));
            moved.emplace(rows);
          }
          if (compensation) {
            StepOfRows(*compensation, rows, old, Padded(origins.ops[i]),
                       scalars, &after, &of_policy);
          } else {
            rows.Step(rule.id, absl::MakeSpan(after), scalars, old);
          }
          is_step_accepted = true;
        }
      }
      for (size_t s = 0; s < after.size(); ++s) {
        const int at = contract_.state(s) + i;
        if (!is_step_accepted) after[s] = accepted(after[s], at);
        OP_REQUIRES_OK(ctx, variables.Assign(at, after[s]));
      }
      for (size_t m = 0; m < of_policy.size(); ++m) {
        const int at = contract_.memory(m) + i;
        // Of a sparse gradient, no row counts if the step is not accepted.
        OP_REQUIRES_OK(
            ctx, variables.Assign(at, sparse ? of_policy[m]
                                             : accepted(of_policy[m], at)));
      }
      const XlaOp value = Stored(after[0], type_);
      for (int k = 0; k < averages_.per_value(); ++k) {
        const int shadow = shadows + k * averages_.values() + i;
        if (averages_.lazy()) {
          const int log = log_decays + k * averages_.values() + i;
          if (!moved) {  // The variable has no element.
            OP_REQUIRES_OK(ctx, variables.Assign(log, variables.value(log)));
            continue;
          }
          OP_REQUIRES_OK(
              ctx, variables.Assign(
                       shadow, moved->Put(variables.value(shadow),
                                          averages_.Updated(
                                              caught_up[k], moved->Get(value),
                                              rates[k]))));
          OP_REQUIRES_OK(ctx, variables.Assign(
                                  log, moved->Marked(variables.value(log),
                                                     old_logs[k], logs[k])));
          continue;
        }
        const XlaOp updated =
            averages_.Updated(variables.value(shadow), value, rates[k]);
        OP_REQUIRES_OK(ctx,
                       variables.Assign(shadow, accepted(updated, shadow)));
      }
    }
  }

 private:
  // The compensated step of the rows that have gradients.
  void StepOfRows(const XlaCompensation& compensation, const Rows& rows,
                  XlaOp old, XlaOp origins, absl::Span<const XlaOp> scalars,
                  std::vector<XlaOp>* states,
                  std::vector<XlaOp>* memory) const {
    const Rows::Sums sums = rows.Sum();
    std::vector<XlaOp> of_states = rows.Get(sums, *states, old), of_memory;
    for (const XlaOp& state : *memory) {
      of_memory.push_back(rows.Get(sums, state));
    }
    const XlaOp before = of_states[0];
    const XlaOp grad =
        compensation.Before(before, rows.OfSums(sums, origins), sums.grad,
                             &of_memory);
    Step(contract_.rule().id, type_, absl::MakeSpan(of_states), {grad},
         scalars);
    compensation.After(before, Stored(of_states[0], type_), &of_memory);
    for (size_t s = 0; s < states->size(); ++s) {
      (*states)[s] = rows.Put(sums, (*states)[s], of_states[s]);
    }
    for (size_t m = 0; m < memory->size(); ++m) {
      (*memory)[m] = rows.Put(sums, (*memory)[m], of_memory[m]);
    }
  }

  absl::Status Call(XlaOpKernelContext* ctx, XlaVariables* variables,
                    const std::vector<XlaOp>& grads,
                    const std::vector<XlaOp>& indices) const {
    xla::XlaBuilder* builder = ctx->builder();
    const int n = contract_.variables();
    const bool sparse = contract_.sparse();
    const std::string rule =
        absl::StrCat("rule = ", Quoted(contract_.rule().name));
    for (int first = 0, end; first < n; first = end) {
      end = sparse ? n : EndOfCall(*variables, first);
      const int count = end - first;
      KernelCall call(variables);
      call.Read(ctx->Input("accept"));
      call.Read(ctx->Input("decays"));
      call.Read(ctx->Input("scalars"));
      if (sparse) call.Read(Counts(builder, indices));
      for (int s = 0; s < contract_.rule_states(); ++s) {
        call.Write(contract_.state(s) + first, count);
      }
      for (int k = 0; k < averages_.per_value(); ++k) {
        call.Write(contract_.shadows() + k * n + first, count);
      }
      if (averages_.lazy()) {
        call.Write(contract_.log_decays(averages_), averages_.count());
      }
      for (int i = first; i < end; ++i) {
        call.Read(sparse ? Padded(grads[i]) : grads[i]);
      }
      for (const XlaOp of_variable : indices) call.Read(Padded(of_variable));
      TF_RETURN_IF_ERROR(
          sparse ? call.Emit(builder, kSparseApplyCall,
                             absl::StrCat("{", rule, ", names = ",
                                          Names(*variables, 0, n), "}"))
                 : call.Emit(builder, kApplyCall,
                             absl::StrCat("{", rule, "}")));
    }
    return absl::OkStatus();
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

  // The input "scalars" in the compute type.
  absl::Status ReadScalars(XlaOpKernelContext* ctx,
                           std::vector<XlaOp>* scalars) const {
    TF_RETURN_IF_ERROR(contract_.CheckScalars(ctx->InputShape("scalars")));
    const std::optional<Tensor> known = Known(ctx, "scalars");
    const int count = contract_.rule_scalars() + contract_.policy_scalars();
    for (int c = 0; c < count; ++c) {
      scalars->push_back(
          known ? Scalar(ctx, compute_, known->vec<double>()(c))
                : xla::ConvertElementType(Element(ctx->Input("scalars"), c),
                                          compute_));
    }
    return absl::OkStatus();
  }

  static constexpr int64_t kBytesOfCall = 1 << 20;

  XlaAverages averages_;
  ApplyContract contract_;
  xla::PrimitiveType type_, compute_;
};

class AveragingAssignXlaOp : public XlaOpKernel {
 public:
  explicit AveragingAssignXlaOp(OpKernelConstruction* ctx) : XlaOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, contract_.Init(ctx));
    sum_ = XlaType(contract_.sum_dtype());
  }

  void Compile(XlaOpKernelContext* ctx) override {
    XlaOp rate;
    OP_REQUIRES_OK(ctx, ReadRate(ctx, &rate));
    std::vector<XlaOp> weights;
    OP_REQUIRES_OK(ctx, ReadWeights(ctx, &weights));

    XlaVariables variables(ctx);
    int targets, sources;
    OP_REQUIRES_OK(ctx, variables.Find("targets", Access::kWrite, &targets));
    OP_REQUIRES_OK(
        ctx, variables.Find("sources", Access::kReadWritten, &sources));
    OP_REQUIRES_OK(ctx, contract_.CheckVariables(variables, targets, sources));
    const int n = contract_.variables();
    int first_tensor, end;
    OP_REQUIRES_OK(ctx, InputRange("tensors", &first_tensor, &end));
    Inputs tensors;
    OP_REQUIRES_OK(ctx, ReadInputs(ctx, "tensors", &tensors));
    for (int p = 0; p < n * contract_.tensors(); ++p) {
      OP_REQUIRES_OK(ctx, contract_.CheckTensor(
                              variables, targets, p,
                              ctx->input_type(first_tensor + p),
                              ctx->input_type(first_tensor + p - p % n),
                              tensors.shapes[p]));
      OP_REQUIRES_OK(ctx, CheckStatic("tensors", p, tensors.ops[p]));
    }

    for (int i = 0; i < n; ++i) {
      XlaOp sum = xla::Broadcast(
          xla::Zero(ctx->builder(), sum_),
          variables.shape(targets + i).dim_sizes());
      for (size_t s = 0; s < weights.size(); ++s) {
        const int row = s - contract_.sources();
        const XlaOp source = row < 0 ? variables.value(sources + s * n + i)
                                     : tensors.ops[row * n + i];
        Step(RuleId::kWeightedSum, sum_, absl::MakeSpan(&sum, 1), {source},
             {weights[s], Scalar(ctx, sum_, s == 0 ? 1 : 0)});
      }
      for (int t = 0; t < contract_.targets(); ++t) {
        const int target = targets + t * n + i;
        XlaOp value = variables.value(target);
        Step(RuleId::kEma, variables.type(target), absl::MakeSpan(&value, 1),
             {sum}, {rate});
        OP_REQUIRES_OK(ctx, variables.Assign(target, value));
      }
    }
  }

 private:
  absl::Status ReadRate(XlaOpKernelContext* ctx, XlaOp* rate) const {
    TF_RETURN_IF_ERROR(CheckScalar("rate", ctx->InputShape("rate")));
    if (const std::optional<Tensor> known = Known(ctx, "rate")) {
      const double value = known->scalar<double>()();
      *rate = Scalar(ctx, sum_, value);
      return contract_.CheckRate(value);
    }
    *rate = xla::ConvertElementType(ctx->Input("rate"), sum_);
    return absl::OkStatus();
  }

  absl::Status ReadWeights(XlaOpKernelContext* ctx,
                           std::vector<XlaOp>* weights) const {
    const std::optional<Tensor> known = Known(ctx, "weights");
    TF_RETURN_IF_ERROR(contract_.CheckWeights(ctx->InputShape("weights"),
                                              known ? &*known : nullptr));
    for (int s = 0; s < contract_.sources() + contract_.tensors(); ++s) {
      if (known) {
        weights->push_back(Scalar(ctx, sum_, known->vec<double>()(s)));
      } else {
        weights->push_back(
            xla::ConvertElementType(Element(ctx->Input("weights"), s), sum_));
      }
    }
    return absl::OkStatus();
  }

  AveragingAssignContract contract_;
  xla::PrimitiveType sum_;
};

class SwapXlaOp : public XlaOpKernel {
 public:
  explicit SwapXlaOp(OpKernelConstruction* ctx) : XlaOpKernel(ctx) {}

  void Compile(XlaOpKernelContext* ctx) override {
    XlaVariables variables(ctx);
    int a, b;
    OP_REQUIRES_OK(ctx, variables.Find("a", Access::kWrite, &a));
    OP_REQUIRES_OK(ctx, variables.Find("b", Access::kWrite, &b));
    const int n = b - a;
    for (int i = 0; i < n; ++i) {
      OP_REQUIRES_OK(ctx, CheckSwap(variables, a + i, b + i));
    }
    for (int i = 0; i < n; ++i) {
      OP_REQUIRES_OK(ctx,
                     variables.Assign(a + i, variables.value(b + i)));
      OP_REQUIRES_OK(ctx,
                     variables.Assign(b + i, variables.value(a + i)));
    }
  }
};

class CheckInitializedXlaOp : public XlaOpKernel {
 public:
  explicit CheckInitializedXlaOp(OpKernelConstruction* ctx)
      : XlaOpKernel(ctx) {}

  void Compile(XlaOpKernelContext* ctx) override {
    XlaVariables variables(ctx);
    int first;
    OP_REQUIRES_OK(ctx, variables.Find("variables", Access::kRead, &first));
  }
};

template <class Op>
OpKernel* Make(OpKernelConstruction* ctx) {
  return new Op(ctx);
}

const bool xla_registered = [] {
  RegisterXlaKernel("Wrapopt>Apply", &Make<ApplyXlaOp>);
  RegisterXlaKernel("Wrapopt>EmaUpdate", &Make<EmaUpdateXlaOp>);
  using Kind = LazyAveragesXlaOp::Kind;
  RegisterXlaKernel("Wrapopt>CatchUp",
                    &Make<LazyAveragesXlaOpOf<Kind::kCatchUp>>);
  RegisterXlaKernel("Wrapopt>ReadAverages",
                    &Make<LazyAveragesXlaOpOf<Kind::kRead>>);
  RegisterXlaKernel("Wrapopt>SparseEmaUpdate",
                    &Make<LazyAveragesXlaOpOf<Kind::kStep>>);
  RegisterXlaKernel("Wrapopt>AveragingAssign", &Make<AveragingAssignXlaOp>);
  RegisterXlaKernel("Wrapopt>CheckInitialized",
                    &Make<CheckInitializedXlaOp>);
  RegisterXlaKernel("Wrapopt>Exchange", &Make<SwapXlaOp>);
  return true;
}();

}  // namespace
}  // namespace wrapopt
