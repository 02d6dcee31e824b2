#include "cc/ops/contracts.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "cc/rules/catch_up.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/errors.h"

#if defined(__x86_64__) && defined(__GLIBC__)
// The version of `log` in glibc before 2.29. The later one sets no errno.
__asm__(".symver log,log@GLIBC_2.2.5");
#endif

namespace wrapopt {

using tensorflow::DataType;
using tensorflow::DataTypeString;
using tensorflow::OpKernelConstruction;
using tensorflow::PartialTensorShape;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;

namespace {

// ", or float" if what belongs to a variable of `dtype` may be of it, too.
std::string OrFloat(DataType dtype) {
  const bool low = dtype != tensorflow::DT_FLOAT &&
                   FitsLowPrecision(tensorflow::DT_FLOAT, dtype);
  return low ? ", or float" : "";
}

bool Known(DataType dtype) { return dtype != tensorflow::DT_INVALID; }

// A vector of so many elements, -1 if that is not known.
PartialTensorShape Vector(int64_t size) { return PartialTensorShape({size}); }

}  // namespace

absl::Status Misshapen(absl::string_view subject, const PartialTensorShape& got,
                       absl::string_view expected, absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat(subject, " misshapen: got ", got.DebugString(),
                   " but expected ", expected, " (", why, ")"));
}

absl::Status CheckShape(absl::string_view subject,
                        const PartialTensorShape& got,
                        const PartialTensorShape& expected,
                        absl::string_view why) {
  if (got.IsCompatibleWith(expected)) return absl::OkStatus();
  return Misshapen(subject, got, expected.DebugString(), why);
}

absl::Status CheckScalar(absl::string_view name,
                         const PartialTensorShape& shape) {
  if (shape.unknown_rank() || shape.dims() == 0) return absl::OkStatus();
  return Misshapen(name, shape, "[]", "a scalar");
}

absl::Status CheckIndices(int i, const PartialTensorShape& shape) {
  if (shape.IsCompatibleWith(Vector(-1))) return absl::OkStatus();
  return Misshapen(absl::StrCat("indices[", i, "]"), shape, "[M]",
                   "a vector of M rows");
}

bool FitsLowPrecision(DataType other, DataType dtype) {
  return other == dtype || (other == tensorflow::DT_FLOAT &&
                            (dtype == tensorflow::DT_HALF ||
                             dtype == tensorflow::DT_BFLOAT16));
}

absl::Status CheckCount(const std::vector<VariableList>& lists, int64_t got) {
  int64_t expected = 0;
  std::string names;
  for (const VariableList& list : lists) {
    expected += list.count;
    if (list.count == 0) continue;
    absl::StrAppend(&names, names.empty() ? "" : ", ", list.count, " ",
                    list.name);
  }
  if (got == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("variables must be ", expected, " (", names, "), got ",
                   got));
}

absl::Status CheckedVariables::CheckDtype(int variable, DataType dtype) const {
  const DataType got = known_dtype(variable);
  if (got == dtype || !Known(got)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      Describe(variable), " must be of dtype ", DataTypeString(dtype),
      ", the op's, got ", DataTypeString(got)));
}

absl::Status CheckedVariables::CheckShape(int variable,
                                          const PartialTensorShape& expected,
                                          absl::string_view why) const {
  const PartialTensorShape& got = known_shape(variable);
  if (got.IsCompatibleWith(expected)) return absl::OkStatus();
  return Misshapen(Describe(variable), got, expected.DebugString(), why);
}

absl::Status CheckedVariables::CheckSameShape(int variable, int like) const {
  const PartialTensorShape& got = known_shape(variable);
  const PartialTensorShape& expected = known_shape(like);
  if (got.IsCompatibleWith(expected)) return absl::OkStatus();
  return Misshapen(Describe(variable), got, expected.DebugString(),
                   absl::StrCat("the shape of ", Describe(like)));
}

absl::Status CheckedVariables::CheckSameShape(const PartialTensorShape& shape,
                                              const char* list, int position,
                                              int like) const {
  const PartialTensorShape& expected = known_shape(like);
  if (shape.IsCompatibleWith(expected)) return absl::OkStatus();
  return Misshapen(absl::StrCat(list, "[", position, "]"), shape,
                   expected.DebugString(),
                   absl::StrCat("the shape of ", Describe(like)));
}

absl::Status CheckedVariables::CheckHasRows(int variable) const {
  if (known_shape(variable).dims() != 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(Describe(variable), " must have rows, got a scalar"));
}

absl::Status CheckedVariables::CountElements(int first, int count,
                                             DataType dtype,
                                             int64_t* elements) const {
  *elements = 0;
  for (int variable = first; variable < first + count; ++variable) {
    TF_RETURN_IF_ERROR(CheckDtype(variable, dtype));
    const int64_t more = known_shape(variable).num_elements();
    *elements = *elements < 0 || more < 0 ? -1 : *elements + more;
  }
  return absl::OkStatus();
}

absl::Status CheckedVariables::NotInitialized(int variable) const {
  return absl::FailedPreconditionError(absl::StrCat(
      Describe(variable), " is not initialized: run its initializer first. "
      "If it is an average that averaged_weights() has put in place of its "
      "variable, leave that `with` block first"));
}

absl::Status CheckedVariables::NamedTwice(int a, int b) const {
  const auto [first, second] = std::minmax(a, b);
  return absl::InvalidArgumentError(absl::StrCat(
      Describe(first), " and ", Describe(second),
      " are one variable: a variable that is updated must be named once"));
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

absl::Status FindUpdate(absl::string_view name, const RuleInfo** rule) {
  std::string names;
  for (const RuleInfo& info : kRules) {
    if (info.inputs != "grad") continue;
    if (name == info.name) {
      *rule = &info;
      return absl::OkStatus();
    }
    absl::StrAppend(&names, names.empty() ? "" : ", ", info.name);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("rule must be one of ", names, ", got '", name, "'"));
}

namespace {

absl::Status FindPolicy(absl::string_view name, const PolicyInfo** found) {
  std::string names;
  for (const PolicyInfo& policy : kPolicies) {
    if (name == policy.name()) *found = &policy;
    absl::StrAppend(&names, ", ", policy.name());
  }
  if (*found != nullptr || name.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("policy must be empty or one of ", names.substr(2),
                   ", got '", name, "'"));
}

}  // namespace

template <class Context>
absl::Status ApplyContract::Init(Context* ctx,
                                 const ShadowContract& averages) {
  std::string rule, policy;
  TF_RETURN_IF_ERROR(ctx->GetAttr("rule", &rule));
  TF_RETURN_IF_ERROR(FindUpdate(rule, &rule_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("policy", &policy));
  TF_RETURN_IF_ERROR(FindPolicy(policy, &policy_));
  states_ = absl::StrSplit(rule_->states, ' ');
  int indices, origins;
  DataType origin_dtype;
  TF_RETURN_IF_ERROR(ctx->GetAttr("N", &n_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("NI", &indices));
  TF_RETURN_IF_ERROR(ctx->GetAttr("NO", &origins));
  TF_RETURN_IF_ERROR(ctx->GetAttr("T", &dtype_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("G", &grad_dtype_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("O", &origin_dtype));
  sparse_ = indices > 0;
  if (!FitsLowPrecision(grad_dtype_, dtype_)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "grad must be of dtype ", DataTypeString(dtype_), ", the variables'",
        OrFloat(dtype_), ", got ", DataTypeString(grad_dtype_)));
  }
  const int expected = policy_ == nullptr ? 0 : n_;
  if (origins != expected) {
    return absl::InvalidArgumentError(absl::StrCat(
        "origins must be ", expected, " tensors for the policy '", policy,
        "' and N = ", n_, " variables, got ", origins));
  }
  if (origins > 0 && origin_dtype != dtype_) {
    return absl::InvalidArgumentError(absl::StrCat(
        "origins must be of dtype ", DataTypeString(dtype_),
        ", the variables', got ", DataTypeString(origin_dtype)));
  }
  if (averages.lazy() && !(sparse_ && rule_->sparse == Sparse::kRows)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "log_decays must be empty for ",
        sparse_ ? rule_->name : "a dense gradient",
        ", whose step changes all rows of a variable"));
  }
  return absl::OkStatus();
}

template absl::Status ApplyContract::Init(OpKernelConstruction* ctx,
                                          const ShadowContract& averages);
template absl::Status ApplyContract::Init(InferenceContext* ctx,
                                          const ShadowContract& averages);

std::vector<VariableList> ApplyContract::Lists(
    const ShadowContract& averages) const {
  std::vector<VariableList> lists;
  for (const absl::string_view state : states_) lists.push_back({state, n_});
  if (policy_ != nullptr) lists.push_back({"memory", n_ * memory_states()});
  lists.push_back({"shadows", averages.count()});
  lists.push_back({"log_decays", averages.lazy() ? averages.count() : 0,
                   /*is_read=*/false, tensorflow::DT_DOUBLE});
  return lists;
}

absl::Status ApplyContract::CheckVariables(
    const CheckedVariables& variables, const ShadowContract& averages) const {
  TF_RETURN_IF_ERROR(averages.Check(variables, shadows(), /*values=*/0));
  TF_RETURN_IF_ERROR(averages.CheckLogDecays(
      variables, log_decays(averages), /*values=*/0));
  for (int at = 0; at < shadows(); ++at) {
    TF_RETURN_IF_ERROR(variables.CheckDtype(
        at, at < memory(0) ? dtype_ : compute_dtype()));
    TF_RETURN_IF_ERROR(variables.CheckSameShape(at, at % n_));
  }
  return absl::OkStatus();
}

absl::Status ApplyContract::CheckScalars(
    const PartialTensorShape& shape) const {
  std::string names(rule_->scalars);
  if (policy_ != nullptr) {
    absl::StrAppend(&names, " ", Info(policy_->rule).scalars);
    if (policy_->measures) {
      absl::StrAppend(&names, " ", Info(RuleId::kStepSize).scalars);
    }
  }
  return CheckShape("scalars", shape, Vector(rule_scalars() + policy_scalars()),
                    absl::StrReplaceAll(names, {{" ", ", "}, {"?", ""}}));
}

absl::Status ApplyContract::CheckRows(const CheckedVariables& variables, int i,
                                      const PartialTensorShape& grad,
                                      const PartialTensorShape& indices) const {
  TF_RETURN_IF_ERROR(variables.CheckHasRows(i));
  TF_RETURN_IF_ERROR(CheckIndices(i, indices));
  PartialTensorShape expected = variables.known_shape(i);
  if (expected.unknown_rank()) return absl::OkStatus();
  expected.set_dim(0, indices.unknown_rank() ? -1 : indices.dim_size(0));
  if (grad.IsCompatibleWith(expected)) return absl::OkStatus();
  return Misshapen(absl::StrCat("grad[", i, "]"), grad, expected.DebugString(),
                   absl::StrCat("a row of ", variables.Describe(i),
                                " for each of indices[", i, "]"));
}

absl::Status ApplyContract::CheckOrigins(int i,
                                         const PartialTensorShape& shape,
                                         const PartialTensorShape& grad) const {
  return CheckShape(absl::StrCat("origins[", i, "]"), shape, grad,
                    absl::StrCat("the shape of grad[", i, "]"));
}

namespace {

// The length of the input that is of the attribute `count` resources, or of the
// dtypes that the attribute `dtypes` lists.
template <class Context>
absl::Status CountInputs(Context* ctx, const char* count, const char* dtypes,
                         int* inputs) {
  if (count != nullptr && ctx->GetAttr(count, inputs).ok()) {
    return absl::OkStatus();
  }
  std::vector<DataType> listed;
  TF_RETURN_IF_ERROR(ctx->GetAttr(dtypes, &listed));
  *inputs = listed.size();
  return absl::OkStatus();
}

}  // namespace

template <class Context>
absl::Status AveragingAssignContract::Init(Context* ctx) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("N", &n_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("T", &dtype_));
  int targets, sources, tensors;
  TF_RETURN_IF_ERROR(CountInputs(ctx, "NT", "TT", &targets));
  TF_RETURN_IF_ERROR(CountInputs(ctx, "NS", "ST", &sources));
  TF_RETURN_IF_ERROR(CountInputs(ctx, nullptr, "V", &tensors));
  TF_RETURN_IF_ERROR(CountRows("targets", targets, &targets_));
  TF_RETURN_IF_ERROR(CountRows("sources", sources, &sources_));
  TF_RETURN_IF_ERROR(CountRows("tensors", tensors, &tensors_));
  if (targets_ > 0 && sources_ + tensors_ > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "each variable must have a target and a source, got ", targets_,
      " targets and ", sources_ + tensors_, " sources"));
}

template absl::Status AveragingAssignContract::Init(OpKernelConstruction* ctx);
template absl::Status AveragingAssignContract::Init(InferenceContext* ctx);

absl::Status AveragingAssignContract::CountRows(const char* list, int count,
                                                int* rows) const {
  *rows = count / n_;
  if (count % n_ == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(list, " must be rows of N = ", n_, ", got ", count));
}

absl::Status AveragingAssignContract::CheckRate(double rate) const {
  if (rate >= 0 && rate <= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("rate must be in [0, 1], got ", rate));
}

absl::Status AveragingAssignContract::CheckWeights(
    const PartialTensorShape& shape, const Tensor* value) const {
  TF_RETURN_IF_ERROR(CheckShape("weights", shape, Vector(sources_ + tensors_),
                                "one weight for each source"));
  for (int s = 0; value != nullptr && s < value->NumElements(); ++s) {
    const double weight = value->vec<double>()(s);
    if (std::isfinite(weight)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("weights[", s, "] must be finite, got ", weight));
  }
  return absl::OkStatus();
}

bool AveragingAssignContract::FitsRow(DataType got, DataType first) const {
  return !Known(got) || !Known(first) ||
         (got == first && FitsLowPrecision(got, dtype_));
}

absl::Status AveragingAssignContract::DtypeError(
    const std::string& subject, DataType got, const std::string& first_subject,
    DataType first) const {
  if (!FitsLowPrecision(got, dtype_)) {
    return absl::InvalidArgumentError(absl::StrCat(
        subject, " must be of dtype ", DataTypeString(dtype_), ", the op's",
        OrFloat(dtype_), ", got ", DataTypeString(got)));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      subject, " must be of dtype ", DataTypeString(first), " (the dtype of ",
      first_subject, ", the first of its row), got ", DataTypeString(got)));
}

// The dtype and shape of one variable of the list that begins at `first`.
absl::Status AveragingAssignContract::CheckVariable(
    const CheckedVariables& variables, int targets, int first,
    int variable) const {
  const int row = variable - (variable - first) % n_;
  const DataType got = variables.known_dtype(variable);
  const DataType expected = variables.known_dtype(row);
  if (!FitsRow(got, expected)) {
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
    DataType dtype, DataType first_of_row,
    const PartialTensorShape& shape) const {
  if (!FitsRow(dtype, first_of_row)) {
    return DtypeError(absl::StrCat("tensors[", position, "]"), dtype,
                      absl::StrCat("tensors[", position - position % n_, "]"),
                      first_of_row);
  }
  return variables.CheckSameShape(shape, "tensors", position,
                                  targets + position % n_);
}

absl::Status CheckSwap(const CheckedVariables& variables, int a, int b) {
  const DataType got = variables.known_dtype(b);
  const DataType expected = variables.known_dtype(a);
  if (Known(got) && Known(expected) && got != expected) {
    return absl::InvalidArgumentError(absl::StrCat(
        variables.Describe(b), " must be of dtype ", DataTypeString(expected),
        " (the dtype of ", variables.Describe(a), "), got ",
        DataTypeString(got), ": buffers are exchanged, not converted"));
  }
  if (Known(expected) && !tensorflow::DataTypeCanUseMemcpy(expected)) {
    return absl::InvalidArgumentError(
        absl::StrCat(variables.Describe(a), " must be of a numeric dtype, got ",
                     DataTypeString(expected)));
  }
  return variables.CheckSameShape(b, a);
}

absl::Status CheckPacked(const PartialTensorShape& shape, int count,
                         int64_t elements) {
  return CheckShape("packed", shape, Vector(elements),
                    absl::StrCat("the elements of all ", count, " variables"));
}

}  // namespace wrapopt
