#include "cc/kernels/contracts.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "cc/ops/shadows.h"
#include "tensorflow/core/platform/errors.h"

#if defined(__x86_64__) && defined(__GLIBC__)
// The version of `log` in glibc before 2.29. The later one sets no errno.
__asm__(".symver log,log@GLIBC_2.2.5");
#endif

namespace wrapopt {

using tensorflow::DataType;
using tensorflow::DataTypeString;
using tensorflow::OpKernelConstruction;
using tensorflow::Tensor;
using tensorflow::TensorShape;

absl::Status CheckedVariables::CheckDtype(int variable, DataType dtype) const {
  const DataType got = this->dtype(variable);
  if (got == dtype) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      Describe(variable), " must be of dtype ", DataTypeString(dtype),
      ", the op's, got ", DataTypeString(got)));
}

absl::Status CheckedVariables::CheckSameShape(int variable, int like) const {
  const TensorShape& got = shape(variable);
  const TensorShape& expected = shape(like);
  if (got.IsSameSize(expected)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      Describe(variable), " misshapen: got ", got.DebugString(),
      " but expected ", expected.DebugString(), " (the shape of ",
      Describe(like), ")"));
}

absl::Status CheckedVariables::CheckSameShape(const TensorShape& shape,
                                              const char* list, int position,
                                              int like) const {
  const TensorShape& expected = this->shape(like);
  if (shape.IsSameSize(expected)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      list, "[", position, "] misshapen: got ", shape.DebugString(),
      " but expected ", expected.DebugString(), " (the shape of ",
      Describe(like), ")"));
}

absl::Status CheckedVariables::NotInitialized(int variable) const {
  return absl::FailedPreconditionError(absl::StrCat(
      Describe(variable), " is not initialized: run its initializer first"));
}

absl::Status CheckedVariables::NamedTwice(int a, int b) const {
  const auto [first, second] = std::minmax(a, b);
  return absl::InvalidArgumentError(absl::StrCat(
      Describe(first), " and ", Describe(second),
      " are one variable: a variable that is updated must be named once"));
}

absl::Status CheckScalar(absl::string_view name, const TensorShape& shape) {
  if (shape.dims() == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " misshapen: got ", shape.DebugString(),
                   " but expected [] (a scalar)"));
}

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

absl::Status ShadowContract::Init(OpKernelConstruction* ctx) {
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
  if (ctx->HasAttr("NL")) {
    int log_decays;
    TF_RETURN_IF_ERROR(ctx->GetAttr("NL", &log_decays));
    lazy_ = log_decays > 0;
    if (lazy_ && log_decays != shadows) {
      return absl::InvalidArgumentError(absl::StrCat(
          "log_decays must be none or one for each of the ", shadows,
          " shadows, got ", log_decays));
    }
  }
  if (k_ > 0 && !FitsLowPrecision(shadow_dtype_, value_dtype_)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "shadows must be of dtype ", DataTypeString(value_dtype_),
        ", the values', or float for half and bfloat16, got ",
        DataTypeString(shadow_dtype_)));
  }
  return absl::OkStatus();
}

absl::Status ShadowContract::CheckDecays(const TensorShape& shape) const {
  if (shape.dims() == 1 && shape.num_elements() == k_) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("decays misshapen: got ", shape.DebugString(),
                   " but expected [", k_,
                   "] (one decay for each shadow of a value)"));
}

absl::Status ShadowContract::ToRates(const Tensor& decays,
                                     std::vector<double>* rates) const {
  TF_RETURN_IF_ERROR(CheckDecays(decays.shape()));
  return wrapopt::ToRates(
      absl::MakeConstSpan(decays.vec<double>().data(), k_), rates);
}

double ShadowContract::LogOf(double decay) {
  // Not -infinity: the difference of two would be NaN. exp(-800) is 0.
  return std::max(std::log(decay), -800.0);
}

absl::Status ShadowContract::ShapeOfLogDecays(
    const CheckedVariables& variables, int value, TensorShape* shape) {
  const TensorShape& of_value = variables.shape(value);
  if (of_value.dims() == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(variables.Describe(value),
                     " must have rows for log_decays, got a scalar"));
  }
  *shape = TensorShape({of_value.dim_size(0) + 1});
  return absl::OkStatus();
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

absl::Status ApplyContract::Init(OpKernelConstruction* ctx,
                                 const RuleInfo& rule, Scalars scalars) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("N", &n_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("T", &dtype_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("G", &grad_dtype_));
  if (!FitsLowPrecision(grad_dtype_, dtype_)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "grad must be of dtype ", DataTypeString(dtype_),
        ", the variables', or float for half and bfloat16, got ",
        DataTypeString(grad_dtype_)));
  }
  states_ = absl::StrSplit(rule.states, ' ');
  for (absl::string_view name : absl::StrSplit(rule.scalars, ' ')) {
    bool value = false;
    const bool is_attribute =
        absl::ConsumeSuffix(&name, "?") && scalars == Scalars::kByName;
    if (is_attribute) TF_RETURN_IF_ERROR(ctx->GetAttr(name, &value));
    scalars_.push_back({std::string(name), is_attribute, value ? 1.0 : 0.0});
  }
  return absl::OkStatus();
}

absl::Status ApplyContract::CheckLazy(const ShadowContract& averages,
                                      const RuleInfo& rule) const {
  if (!averages.lazy() || rule.sparse == Sparse::kRows) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "log_decays must be empty for ", rule.name,
      ", whose step changes all rows of a variable"));
}

absl::Status ApplyContract::CheckScalars(const TensorShape& shape) const {
  const int64_t expected = scalars_.size();
  if (shape.dims() == 1 && shape.num_elements() == expected) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("scalars misshapen: got ", shape.DebugString(),
                   " but expected [", expected, "] (the rule's scalars)"));
}

absl::Status ApplyContract::CheckStates(const CheckedVariables& variables,
                                        const std::vector<int>& states) const {
  for (size_t s = 1; s < states.size(); ++s) {
    for (int i = 0; i < n_; ++i) {
      TF_RETURN_IF_ERROR(variables.CheckDtype(states[s] + i, dtype_));
      TF_RETURN_IF_ERROR(
          variables.CheckSameShape(states[s] + i, states[0] + i));
    }
  }
  return absl::OkStatus();
}

absl::Status ApplyContract::CheckRows(const CheckedVariables& variables,
                                      int var, int i, const TensorShape& grad,
                                      const TensorShape& indices) const {
  if (variables.shape(var).dims() < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(variables.Describe(var),
                     " must have rows for a sparse gradient, got a scalar"));
  }
  if (indices.dims() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("indices[", i, "] misshapen: got ", indices.DebugString(),
                     " but expected a vector"));
  }
  TensorShape expected = variables.shape(var);
  expected.set_dim(0, indices.dim_size(0));
  if (!grad.IsSameSize(expected)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "grad[", i, "] misshapen: got ", grad.DebugString(), " but expected ",
        expected.DebugString(), " (a row of ", variables.Describe(var),
        " for each of indices[", i, "])"));
  }
  return absl::OkStatus();
}

absl::Status AveragingAssignContract::Init(OpKernelConstruction* ctx,
                                           const tensorflow::OpKernel& op) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("N", &n_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("T", &dtype_));
  TF_RETURN_IF_ERROR(CountRows(op, "targets", &targets_));
  TF_RETURN_IF_ERROR(CountRows(op, "sources", &sources_));
  TF_RETURN_IF_ERROR(CountRows(op, "tensors", &tensors_));
  if (targets_ > 0 && sources_ + tensors_ > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "each variable must have a target and a source, got ", targets_,
      " targets and ", sources_ + tensors_, " sources"));
}

absl::Status AveragingAssignContract::CountRows(const tensorflow::OpKernel& op,
                                                const char* list,
                                                int* rows) const {
  int start, stop;
  TF_RETURN_IF_ERROR(op.InputRange(list, &start, &stop));
  *rows = (stop - start) / n_;
  if ((stop - start) % n_ == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      list, " must be rows of N = ", n_, ", got ", stop - start));
}

absl::Status AveragingAssignContract::CheckRate(double rate) const {
  if (rate >= 0 && rate <= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("rate must be in [0, 1], got ", rate));
}

absl::Status AveragingAssignContract::CheckWeights(
    const TensorShape& shape) const {
  const int count = sources_ + tensors_;
  if (shape.dims() == 1 && shape.num_elements() == count) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "weights misshapen: got ", shape.DebugString(), " but expected [", count,
      "] (one weight for each source)"));
}

absl::Status AveragingAssignContract::CheckWeight(int source,
                                                  double weight) const {
  if (std::isfinite(weight)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("weights[", source, "] must be finite, got ", weight));
}

absl::Status AveragingAssignContract::DtypeError(
    const std::string& subject, DataType got, const std::string& first_subject,
    DataType first) const {
  if (FitsLowPrecision(got, dtype_)) {
    return absl::InvalidArgumentError(absl::StrCat(
        subject, " must be of dtype ", DataTypeString(first),
        " (the dtype of ", first_subject, ", the first of its row), got ",
        DataTypeString(got)));
  }
  const bool low = dtype_ != tensorflow::DT_FLOAT &&
                   FitsLowPrecision(tensorflow::DT_FLOAT, dtype_);
  return absl::InvalidArgumentError(absl::StrCat(
      subject, " must be of dtype ", DataTypeString(dtype_), ", the op's",
      low ? ", or float" : "", ", got ", DataTypeString(got)));
}

// The dtype and shape of one variable of the list that begins at `first`.
absl::Status AveragingAssignContract::CheckVariable(
    const CheckedVariables& variables, int targets, int first,
    int variable) const {
  const int row = variable - (variable - first) % n_;
  const DataType got = variables.dtype(variable);
  const DataType expected = variables.dtype(row);
  if (got != expected || !FitsLowPrecision(got, dtype_)) {
    return DtypeError(variables.Describe(variable), got,
                      variables.Describe(row), expected);
  }
  return variables.CheckSameShape(variable, targets + (variable - first) % n_);
}

absl::Status AveragingAssignContract::CheckVariables(
    const CheckedVariables& variables, int targets, int sources) const {
  for (int v = targets; v < targets + n_ * targets_; ++v) {
    TF_RETURN_IF_ERROR(CheckVariable(variables, targets, targets, v));
  }
  for (int v = sources; v < sources + n_ * sources_; ++v) {
    TF_RETURN_IF_ERROR(CheckVariable(variables, targets, sources, v));
    // A source that is also written must be written at the position at which it
    // is read. Otherwise the order of the read and the write is undefined.
    const int target = variables.Written(v);
    if (target >= 0 && (target - targets) % n_ != (v - sources) % n_) {
      return absl::InvalidArgumentError(absl::StrCat(
          variables.Describe(target), " and ", variables.Describe(v),
          " are one variable: a target may be a source of its own mean, not of "
          "another's"));
    }
  }
  return absl::OkStatus();
}

absl::Status AveragingAssignContract::CheckTensor(
    const CheckedVariables& variables, int targets, int position,
    DataType dtype, DataType first_of_row, const TensorShape& shape) const {
  if (dtype != first_of_row || !FitsLowPrecision(dtype, dtype_)) {
    return DtypeError(absl::StrCat("tensors[", position, "]"), dtype,
                      absl::StrCat("tensors[", position - position % n_, "]"),
                      first_of_row);
  }
  return variables.CheckSameShape(shape, "tensors", position,
                                  targets + position % n_);
}

absl::Status CheckExchange(const CheckedVariables& variables, int a, int b) {
  const DataType got = variables.dtype(b);
  const DataType expected = variables.dtype(a);
  if (got != expected) {
    return absl::InvalidArgumentError(absl::StrCat(
        variables.Describe(b), " must be of dtype ", DataTypeString(expected),
        " (the dtype of ", variables.Describe(a), "), got ",
        DataTypeString(got), ": buffers are exchanged, not converted"));
  }
  if (!tensorflow::DataTypeCanUseMemcpy(expected)) {
    return absl::InvalidArgumentError(
        absl::StrCat(variables.Describe(a), " must be of a numeric dtype, got ",
                     DataTypeString(expected)));
  }
  return variables.CheckSameShape(b, a);
}

}  // namespace wrapopt
