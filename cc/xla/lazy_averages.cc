#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/ops/contracts.h"
#include "cc/xla/averages.h"
#include "cc/xla/custom_call.h"
#include "cc/xla/elementwise.h"
#include "cc/xla/ffi_handlers.h"
#include "cc/xla/inputs.h"
#include "cc/xla/registration.h"
#include "cc/xla/variables.h"
#include "tensorflow/compiler/tf2xla/xla_op_kernel.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "xla/hlo/builder/lib/constants.h"
#include "xla/hlo/builder/xla_builder.h"
#include "xla/xla_data.pb.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::TensorShape;
using tensorflow::XlaOpKernel;
using tensorflow::XlaOpKernelContext;
using xla::XlaOp;
using Access = XlaVariables::Access;

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
    Calls calls;
    TF_RETURN_IF_ERROR(CallsKernels(ctx, &calls));
    if (calls == Calls::kCpu) {
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

using Kind = LazyAveragesXlaOp::Kind;
const bool lazy_averages_registered =
    RegisterXlaKernel<LazyAveragesXlaOpOf<Kind::kCatchUp>>("Wrapopt>CatchUp") &&
    RegisterXlaKernel<LazyAveragesXlaOpOf<Kind::kRead>>(
        "Wrapopt>ReadAverages") &&
    RegisterXlaKernel<LazyAveragesXlaOpOf<Kind::kStep>>(
        "Wrapopt>SparseEmaUpdate");

}  // namespace
}  // namespace wrapopt
