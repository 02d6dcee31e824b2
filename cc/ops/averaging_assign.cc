#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/ops/handle_shapes.h"
#include "cc/ops/shadows.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::DataType;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status CountRows(const char* list, int count, int n, int* rows) {
  *rows = count / n;
  if (count % n == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(list, " must be rows of N = ", n, ", got ", count));
}

// A dtype must be the op's, or float if that is half or bfloat16, or unknown.
absl::Status CheckDtype(const std::string& subject, DataType got,
                        DataType dtype) {
  if (got == tensorflow::DT_INVALID || FitsLowPrecision(got, dtype)) {
    return absl::OkStatus();
  }
  const bool low = dtype != tensorflow::DT_FLOAT &&
                   FitsLowPrecision(tensorflow::DT_FLOAT, dtype);
  return absl::InvalidArgumentError(absl::StrCat(
      subject, " must be of dtype ", tensorflow::DataTypeString(dtype),
      ", the op's", low ? ", or float" : "", ", got ",
      tensorflow::DataTypeString(got)));
}

// Inputs in order: targets, sources, tensors, weights, rate.
absl::Status AveragingAssignShape(InferenceContext* c, bool ref) {
  int n;
  DataType dtype;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
  TF_RETURN_IF_ERROR(c->GetAttr("T", &dtype));
  std::vector<DataType> target_dtypes, source_dtypes, tensor_dtypes;
  int targets, sources;
  TF_RETURN_IF_ERROR(c->GetAttr("V", &tensor_dtypes));
  if (ref) {
    TF_RETURN_IF_ERROR(c->GetAttr("TT", &target_dtypes));
    TF_RETURN_IF_ERROR(c->GetAttr("ST", &source_dtypes));
    targets = target_dtypes.size();
    sources = source_dtypes.size();
  } else {
    TF_RETURN_IF_ERROR(c->GetAttr("NT", &targets));
    TF_RETURN_IF_ERROR(c->GetAttr("NS", &sources));
    for (int i = 0; i < targets; ++i) {
      target_dtypes.push_back(VariableDtype(c, i));
    }
    for (int i = 0; i < sources; ++i) {
      source_dtypes.push_back(VariableDtype(c, targets + i));
    }
  }
  const int tensors = tensor_dtypes.size();
  int target_rows, source_rows, tensor_rows;
  TF_RETURN_IF_ERROR(CountRows("targets", targets, n, &target_rows));
  TF_RETURN_IF_ERROR(CountRows("sources", sources, n, &source_rows));
  TF_RETURN_IF_ERROR(CountRows("tensors", tensors, n, &tensor_rows));
  if (target_rows == 0 || source_rows + tensor_rows == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "each variable must have a target and a source, got ", target_rows,
        " targets and ", source_rows + tensor_rows, " sources"));
  }

  auto check_variables = [&](const char* list, int first,
                             const std::vector<DataType>& dtypes)
      -> absl::Status {
    for (int i = 0; i < static_cast<int>(dtypes.size()); ++i) {
      const std::string subject = absl::StrCat(list, "[", i, "]");
      TF_RETURN_IF_ERROR(CheckDtype(subject, dtypes[i], dtype));
      TF_RETURN_IF_ERROR(CheckSameShape(c, ref, first + i, subject, i % n,
                                        absl::StrCat("targets[", i % n, "]")));
    }
    return absl::OkStatus();
  };
  TF_RETURN_IF_ERROR(check_variables("targets", 0, target_dtypes));
  TF_RETURN_IF_ERROR(check_variables("sources", targets, source_dtypes));
  for (int i = 0; i < tensors; ++i) {
    const std::string subject = absl::StrCat("tensors[", i, "]");
    TF_RETURN_IF_ERROR(CheckDtype(subject, tensor_dtypes[i], dtype));
    const ShapeHandle got = c->input(targets + sources + i);
    const ShapeHandle expected = VariableShape(c, i % n, ref);
    ShapeHandle merged;
    if (!c->Merge(got, expected, &merged).ok()) {
      return absl::InvalidArgumentError(absl::StrCat(
          subject, " misshapen: got ", c->DebugString(got), " but expected ",
          c->DebugString(expected), " (the shape of targets[", i % n, "])"));
    }
  }

  const ShapeHandle weights = c->input(targets + sources + tensors);
  ShapeHandle vector;
  if (!c->WithRank(weights, 1, &vector).ok() ||
      !c->Merge(vector, c->Vector(source_rows + tensor_rows), &vector).ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "weights misshapen: got ", c->DebugString(weights), " but expected [",
        source_rows + tensor_rows, "] (one weight for each source)"));
  }
  const ShapeHandle rate = c->input(targets + sources + tensors + 1);
  ShapeHandle scalar;
  if (!c->WithRank(rate, 0, &scalar).ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rate misshapen: got ", c->DebugString(rate),
                     " but expected [] (a scalar)"));
  }
  return absl::OkStatus();
}

constexpr char kDoc[] = R"doc(
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
)doc";

}  // namespace

REGISTER_OP("Wrapopt>AveragingAssign")
    .Input("targets: NT * resource")
    .Input("sources: NS * resource")
    .Input("tensors: V")
    .Input("weights: double")
    .Input("rate: double")
    .Attr("N: int >= 1")
    .Attr("NT: int >= 1")
    .Attr("NS: int >= 0")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("V: list({half, bfloat16, float, double}) >= 0")
    .Attr("use_locking: bool = true")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      return AveragingAssignShape(c, false);
    })
    .Doc(kDoc);

// For the ref variables of TensorFlow 1 graphs.
REGISTER_OP("Wrapopt>AveragingAssignRef")
    .Input("targets: Ref(TT)")
    .Input("sources: Ref(ST)")
    .Input("tensors: V")
    .Input("weights: double")
    .Input("rate: double")
    .Attr("N: int >= 1")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("TT: list({half, bfloat16, float, double}) >= 1")
    .Attr("ST: list({half, bfloat16, float, double}) >= 0")
    .Attr("V: list({half, bfloat16, float, double}) >= 0")
    .Attr("use_locking: bool = true")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      return AveragingAssignShape(c, true);
    })
    .Doc(kDoc);

}  // namespace wrapopt
