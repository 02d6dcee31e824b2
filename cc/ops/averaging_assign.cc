#include "cc/ops/averaging_assign.h"

#include <cmath>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/ops/inferred_inputs.h"
#include "cc/ops/number_types.h"
#include "cc/ops/registration.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/errors.h"

namespace wrapopt {

using tensorflow::DataType;
using tensorflow::DataTypeString;
using tensorflow::OpKernelConstruction;
using tensorflow::PartialTensorShape;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;

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
  return !IsKnown(got) || !IsKnown(first) ||
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

namespace {

absl::Status AveragingAssignShape(InferenceContext* c, bool ref) {
  AveragingAssignContract contract;
  TF_RETURN_IF_ERROR(contract.Init(c));
  InferredInputs inputs(c, ref);
  int targets, sources;
  TF_RETURN_IF_ERROR(inputs.FindVariables("targets", "TT", &targets));
  TF_RETURN_IF_ERROR(inputs.FindVariables("sources", "ST", &sources));
  std::vector<PartialTensorShape> tensors;
  TF_RETURN_IF_ERROR(inputs.FindTensors("tensors", &tensors));
  PartialTensorShape weights;
  TF_RETURN_IF_ERROR(inputs.FindTensor("weights", &weights));
  TF_RETURN_IF_ERROR(contract.CheckWeights(weights, inputs.Constant()));
  TF_RETURN_IF_ERROR(inputs.FindScalar("rate"));
  if (const tensorflow::Tensor* rate = inputs.Constant(); rate != nullptr) {
    TF_RETURN_IF_ERROR(contract.CheckRate(rate->scalar<double>()()));
  }
  TF_RETURN_IF_ERROR(contract.CheckVariables(inputs, targets, sources));
  std::vector<tensorflow::DataType> dtypes;
  TF_RETURN_IF_ERROR(c->GetAttr("V", &dtypes));
  for (size_t p = 0; p < tensors.size(); ++p) {
    TF_RETURN_IF_ERROR(contract.CheckTensor(
        inputs, targets, p, dtypes[p], dtypes[p - p % contract.variables()],
        tensors[p]));
  }
  return absl::OkStatus();
}

}  // namespace

const bool averaging_assign_defined = RegisterWithRef(
    "Wrapopt>AveragingAssign", AveragingAssignShape, [](auto& op, bool ref) {
      op.Input(ref ? "targets: Ref(TT)" : "targets: NT * resource");
      op.Input(ref ? "sources: Ref(ST)" : "sources: NS * resource");
      op.Input("tensors: V");
      op.Input("weights: double");
      op.Input("rate: double");
      op.Attr("N: int >= 1");
      if (!ref) op.Attr("NT: int >= 1");
      if (!ref) op.Attr("NS: int >= 0");
      op.Attr("T: " WRAPOPT_NUMBER_TYPES);
      if (ref) op.Attr("TT: list(" WRAPOPT_NUMBER_TYPES ") >= 1");
      if (ref) op.Attr("ST: list(" WRAPOPT_NUMBER_TYPES ") >= 0");
      op.Attr("V: list(" WRAPOPT_NUMBER_TYPES ") >= 0");
      op.Attr("use_locking: bool = true");
      op.Doc(R"doc(
Moves variables towards the weighted sum of others, in place.

For each of N variables, the weighted sum of its sources

    m = sum_k weights[k] * source_k

and then, for each of its targets,

    target += rate * (m - target)

in one pass over memory: a source is read once, a target written once. half and
bfloat16 are computed in float. The sum is taken in the order of the weights.

Each of the three lists consists of rows of N: the first target of all N
variables, then the second target of all N, and so on. The dtypes of rows may
differ. A target may be a source of its own sum, which uses the old value.

All variables are checked before any is changed.

targets: The variables to move, 1 or more rows.
sources: Variables that are only read, or targets of the same position in a row.
tensors: Sources that are not variables. Together with sources, 1 or more rows.
weights: A finite number for each row of sources, then for each row of tensors.
  A source of weight 0 does not count, even if it is infinite or NaN.
rate: A scalar in [0, 1]. 1 assigns the sum, whatever the target held. 0 changes
  nothing.
T: dtype of the variables. If it is half or bfloat16, rows may have dtype float.
V: dtypes of the tensors.
use_locking: Whether the variables are locked against other updates.
)doc");
    });

}  // namespace wrapopt
