// The contracts of the ops of asynchronous training: the staleness gate and the
// rounds of model averaging.
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/ops/contracts.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/errors.h"

namespace wrapopt {

using tensorflow::DataType;
using tensorflow::DataTypeString;
using tensorflow::PartialTensorShape;

absl::Status CheckStep(const CheckedVariables& variables, int step) {
  const DataType dtype = variables.known_dtype(step);
  if (dtype != tensorflow::DT_INVALID &&
      dtype != tensorflow::DT_INT32 && dtype != tensorflow::DT_INT64) {
    return absl::InvalidArgumentError(
        absl::StrCat(variables.Describe(step), " must be of dtype int32 or ",
                     "int64, got ", DataTypeString(dtype)));
  }
  return variables.CheckShape(step, PartialTensorShape({}), "a scalar");
}

absl::Status CheckGate(const CheckedVariables& variables, int step, int counter,
                       int histogram) {
  TF_RETURN_IF_ERROR(CheckStep(variables, step));
  TF_RETURN_IF_ERROR(variables.CheckDtype(counter, tensorflow::DT_FLOAT));
  TF_RETURN_IF_ERROR(
      variables.CheckShape(counter, PartialTensorShape({}), "a scalar"));
  TF_RETURN_IF_ERROR(variables.CheckDtype(histogram, tensorflow::DT_INT64));
  const PartialTensorShape& shape = variables.known_shape(histogram);
  if (shape.IsCompatibleWith(PartialTensorShape({2, -1})) &&
      (shape.unknown_rank() || shape.dim_size(1) != 0)) {
    return absl::OkStatus();
  }
  return Misshapen(variables.Describe(histogram), shape, "[2, B] with B >= 1",
                   "admitted and dropped, in B buckets");
}

absl::Status CheckTimeout(double timeout_secs) {
  if (timeout_secs > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "timeout_secs must be greater than 0, infinity for no deadline, got ",
      timeout_secs));
}

absl::Status CheckWorkers(const PartialTensorShape& shape) {
  if (shape.IsCompatibleWith(PartialTensorShape({-1}))) return absl::OkStatus();
  return Misshapen("workers", shape, "[M]", "names of workers");
}

}  // namespace wrapopt
