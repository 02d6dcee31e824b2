#include "cc/ops/averages.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "cc/old_glibc.h"
#include "cc/rules/catch_up.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/errors.h"

// The version before 2.29. The later one sets no errno.
WRAPOPT_OLD_GLIBC(log, "2.2.5");

namespace wrapopt {

using tensorflow::DataTypeString;
using tensorflow::OpKernelConstruction;
using tensorflow::PartialTensorShape;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;

absl::Status ToRates(absl::Span<const double> decays,
                     std::vector<double>* rates) {
  for (size_t k = 0; k < decays.size(); ++k) {
    if (!(decays[k] >= 0 && decays[k] <= 1)) {
      return absl::InvalidArgumentError(
          absl::StrCat("decays[", k, "] must be in [0, 1], got ", decays[k]));
    }
    rates->push_back(1 - decays[k]);
  }
  return absl::OkStatus();
}

template <class Context>
absl::Status ShadowContract::Init(Context* ctx) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("T", &value_dtype_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("S", &shadow_dtype_));
  int shadows;
  TF_RETURN_IF_ERROR(ctx->GetAttr("NK", &shadows));
  TF_RETURN_IF_ERROR(ctx->GetAttr("N", &n_));
  if (shadows % n_ != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("shadows must be N * K variables for N = ", n_,
                     " values, got ", shadows));
  }
  k_ = shadows / n_;
  if (int log_decays; ctx->GetAttr("NL", &log_decays).ok()) {
    lazy_ = log_decays > 0;
    if (lazy_ && log_decays != shadows) {
      return absl::InvalidArgumentError(absl::StrCat(
          "log_decays must be none or one for each of the ", shadows,
          " shadows, got ", log_decays));
    }
  }
  if (int indices; ctx->GetAttr("NI", &indices).ok()) {
    if (indices != 0 && indices != n_) {
      return absl::InvalidArgumentError(
          absl::StrCat("indices must be none or one vector for each of the ",
                       n_, " values, got ", indices));
    }
  }
  if (k_ > 0 && !FitsLowPrecision(shadow_dtype_, value_dtype_)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "shadows must be of dtype ", DataTypeString(value_dtype_),
        ", the values'", OrFloat(value_dtype_), ", got ",
        DataTypeString(shadow_dtype_)));
  }
  return absl::OkStatus();
}

template absl::Status ShadowContract::Init(OpKernelConstruction* ctx);
template absl::Status ShadowContract::Init(InferenceContext* ctx);

absl::Status ShadowContract::CheckDecays(const PartialTensorShape& shape,
                                         const Tensor* value) const {
  TF_RETURN_IF_ERROR(CheckShape("decays", shape, Vector(k_),
                                "one decay for each shadow of a value"));
  std::vector<double> rates;
  return value == nullptr ? absl::OkStatus() : ToRates(*value, &rates);
}

absl::Status ShadowContract::ToRates(const Tensor& decays,
                                     std::vector<double>* rates) const {
  TF_RETURN_IF_ERROR(CheckDecays(decays.shape()));
  return wrapopt::ToRates(
      absl::MakeConstSpan(decays.vec<double>().data(), k_), rates);
}

double ShadowContract::LogOf(double decay) {
  // Not -infinity: the difference of two would be NaN.
  return std::max(std::log(decay), CatchUp::kLeastLag);
}

absl::Status ShadowContract::Check(const CheckedVariables& variables,
                                   int shadows, int values) const {
  for (int i = 0; i < n_; ++i) {
    TF_RETURN_IF_ERROR(variables.CheckDtype(values + i, value_dtype_));
    for (int k = 0; k < k_; ++k) {
      const int shadow = shadows + k * n_ + i;
      TF_RETURN_IF_ERROR(variables.CheckDtype(shadow, shadow_dtype_));
      TF_RETURN_IF_ERROR(variables.CheckSameShape(shadow, values + i));
    }
  }
  return absl::OkStatus();
}

absl::Status ShadowContract::ShapeOfLogDecays(
    const CheckedVariables& variables, int value, PartialTensorShape* shape) {
  TF_RETURN_IF_ERROR(variables.CheckHasRows(value));
  const PartialTensorShape& of_value = variables.known_shape(value);
  const int64_t rows = of_value.unknown_rank() ? -1 : of_value.dim_size(0);
  *shape = Vector(rows < 0 ? -1 : rows + kMoreLogDecays);
  return absl::OkStatus();
}

absl::Status ShadowContract::CheckLogDecays(const CheckedVariables& variables,
                                            int log_decays, int values) const {
  if (!lazy_) return absl::OkStatus();
  for (int i = 0; i < n_; ++i) {
    PartialTensorShape expected;
    TF_RETURN_IF_ERROR(ShapeOfLogDecays(variables, values + i, &expected));
    for (int k = 0; k < k_; ++k) {
      const int at = log_decays + k * n_ + i;
      TF_RETURN_IF_ERROR(variables.CheckDtype(at, tensorflow::DT_DOUBLE));
      TF_RETURN_IF_ERROR(variables.CheckShape(
          at, expected, "a number for each row of its value, and two"));
    }
  }
  return absl::OkStatus();
}

}  // namespace wrapopt
