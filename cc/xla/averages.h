#ifndef WRAPOPT_CC_XLA_AVERAGES_H_
#define WRAPOPT_CC_XLA_AVERAGES_H_

#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cc/ops/averages.h"
#include "cc/rules/rules.h"
#include "cc/xla/elementwise.h"
#include "cc/xla/inputs.h"
#include "cc/xla/variables.h"
#include "tensorflow/compiler/tf2xla/xla_op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "xla/hlo/builder/lib/constants.h"
#include "xla/hlo/builder/lib/math.h"
#include "xla/hlo/builder/xla_builder.h"
#include "xla/xla_data.pb.h"

namespace wrapopt {

// The averages of EmaUpdate and Apply.
class XlaAverages : public ShadowContract {
 public:
  // The input "decays" as rates, in the shadows' compute type.
  absl::Status ReadDecays(tensorflow::XlaOpKernelContext* ctx,
                          std::vector<xla::XlaOp>* rates) const {
    const xla::PrimitiveType type = ComputeType(XlaType(shadow_dtype()));
    if (const std::optional<tensorflow::Tensor> known =
            Constant(ctx, "decays")) {
      std::vector<double> constants;
      TF_RETURN_IF_ERROR(ToRates(*known, &constants));
      for (const double rate : constants) {
        rates->push_back(Scalar(ctx, type, rate));
      }
      return absl::OkStatus();
    }
    TF_RETURN_IF_ERROR(CheckDecays(ctx->InputShape("decays")));
    const xla::XlaOp decays = ctx->Input("decays");
    for (int k = 0; k < per_value(); ++k) {
      const xla::XlaOp decay = Element(decays, k);
      rates->push_back(xla::ConvertElementType(
          xla::ScalarLike(decay, 1.0) - decay, type));
    }
    return absl::OkStatus();
  }

  // The input "decays" as logarithms, in double.
  absl::Status ReadLogs(tensorflow::XlaOpKernelContext* ctx,
                        std::vector<xla::XlaOp>* logs) const {
    const std::optional<tensorflow::Tensor> known = Constant(ctx, "decays");
    for (int k = 0; k < per_value(); ++k) {
      if (known) {
        logs->push_back(Scalar(ctx, xla::F64, LogOf(known->vec<double>()(k))));
        continue;
      }
      const xla::XlaOp decay = Element(ctx->Input("decays"), k);
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
  xla::XlaOp Updated(xla::XlaOp shadow, xla::XlaOp value,
                     xla::XlaOp rate) const {
    Step(RuleId::kEma, XlaType(shadow_dtype()), absl::MakeSpan(&shadow, 1),
         {value}, {rate});
    return shadow;
  }
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_XLA_AVERAGES_H_
