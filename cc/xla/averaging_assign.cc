#include <cstddef>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cc/ops/averaging_assign.h"
#include "cc/ops/contracts.h"
#include "cc/rules/rules.h"
#include "cc/xla/elementwise.h"
#include "cc/xla/inputs.h"
#include "cc/xla/registration.h"
#include "cc/xla/variables.h"
#include "tensorflow/compiler/tf2xla/xla_op_kernel.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "xla/hlo/builder/lib/constants.h"
#include "xla/hlo/builder/xla_builder.h"
#include "xla/xla_data.pb.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::Tensor;
using tensorflow::XlaOpKernel;
using tensorflow::XlaOpKernelContext;
using xla::XlaOp;
using Access = XlaVariables::Access;

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
    if (const std::optional<Tensor> known = Constant(ctx, "rate")) {
      const double value = known->scalar<double>()();
      *rate = Scalar(ctx, sum_, value);
      return contract_.CheckRate(value);
    }
    *rate = xla::ConvertElementType(ctx->Input("rate"), sum_);
    return absl::OkStatus();
  }

  absl::Status ReadWeights(XlaOpKernelContext* ctx,
                           std::vector<XlaOp>* weights) const {
    const std::optional<Tensor> known = Constant(ctx, "weights");
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

const bool averaging_assign_registered =
    RegisterXlaKernel<AveragingAssignXlaOp>("Wrapopt>AveragingAssign");

}  // namespace
}  // namespace wrapopt
