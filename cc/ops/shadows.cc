#include "cc/ops/shadows.h"

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "cc/ops/handle_shapes.h"

namespace wrapopt {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

bool FitsLowPrecision(tensorflow::DataType other, tensorflow::DataType dtype) {
  return other == dtype || (other == tensorflow::DT_FLOAT &&
                            (dtype == tensorflow::DT_HALF ||
                             dtype == tensorflow::DT_BFLOAT16));
}

absl::Status CheckShadows(InferenceContext* c, bool ref, int shadows,
                          int values, const std::string& values_name,
                          int decays) {
  int n, nk;
  tensorflow::DataType value_dtype, shadow_dtype;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
  TF_RETURN_IF_ERROR(c->GetAttr("NK", &nk));
  TF_RETURN_IF_ERROR(c->GetAttr("T", &value_dtype));
  TF_RETURN_IF_ERROR(c->GetAttr("S", &shadow_dtype));
  if (nk > 0 && !FitsLowPrecision(shadow_dtype, value_dtype)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "shadows must be of dtype ", tensorflow::DataTypeString(value_dtype),
        ", the values'",
        FitsLowPrecision(tensorflow::DT_FLOAT, value_dtype) &&
                value_dtype != tensorflow::DT_FLOAT
            ? ", or float"
            : "",
        ", got ", tensorflow::DataTypeString(shadow_dtype)));
  }
  if (nk % n != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("shadows must be N * K variables for N = ", n,
                     " values, got ", nk));
  }
  const int64_t averages = nk / n;
  ShapeHandle vector;
  if (decays >= 0 &&
      (!c->WithRank(c->input(decays), 1, &vector).ok() ||
       !c->Merge(vector, c->Vector(averages), &vector).ok())) {
    return absl::InvalidArgumentError(
        absl::StrCat("decays misshapen: got ",
                     c->DebugString(c->input(decays)), " but expected [",
                     averages, "] (one decay for each shadow of a value)"));
  }
  for (int i = 0; i < n; ++i) {
    const std::string value = absl::StrCat(values_name, "[", i, "]");
    if (!ref) {
      TF_RETURN_IF_ERROR(
          CheckVariableDtype(c, values + i, value, value_dtype));
    }
    for (int k = 0; k < averages; ++k) {
      const int shadow = k * n + i;
      const std::string subject = absl::StrCat("shadows[", shadow, "]");
      if (!ref) {
        TF_RETURN_IF_ERROR(
            CheckVariableDtype(c, shadows + shadow, subject, shadow_dtype));
      }
      TF_RETURN_IF_ERROR(
          CheckSameShape(c, ref, shadows + shadow, subject, values + i, value));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckLogDecays(InferenceContext* c, int values, int log_decays) {
  int n, nk, nl;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
  TF_RETURN_IF_ERROR(c->GetAttr("NK", &nk));
  TF_RETURN_IF_ERROR(c->GetAttr("NL", &nl));
  if (nl != 0 && nl != nk) {
    return absl::InvalidArgumentError(
        absl::StrCat("log_decays must be none or one for each of the ", nk,
                     " shadows, got ", nl));
  }
  for (int at = 0; at < nl; ++at) {
    const std::string subject = absl::StrCat("log_decays[", at, "]");
    TF_RETURN_IF_ERROR(CheckVariableDtype(c, log_decays + at, subject,
                                          tensorflow::DT_DOUBLE));
    const ShapeHandle value = VariableShape(c, values + at % n, false);
    if (!c->RankKnown(value)) continue;
    if (c->Rank(value) == 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          subject, " must be of a value with rows, got one that is a scalar"));
    }
    DimensionHandle length;
    TF_RETURN_IF_ERROR(c->Add(c->Dim(value, 0), 1, &length));
    const ShapeHandle got = VariableShape(c, log_decays + at, false);
    ShapeHandle merged;
    if (!c->Merge(got, c->Vector(length), &merged).ok()) {
      return absl::InvalidArgumentError(absl::StrCat(
          subject, " misshapen: got ", c->DebugString(got), " but expected ",
          c->DebugString(c->Vector(length)),
          " (a number for each row of its value, and one)"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckIndices(InferenceContext* c, int i, int indices,
                          ShapeHandle value, const std::string& values_name) {
  ShapeHandle vector;
  if (!c->WithRank(c->input(indices), 1, &vector).ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("indices[", i, "] misshapen: got ",
                     c->DebugString(c->input(indices)),
                     " but expected a vector"));
  }
  if (c->RankKnown(value) && c->Rank(value) == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(values_name, "[", i,
                     "] must have rows for a sparse gradient, got a scalar"));
  }
  return absl::OkStatus();
}

}  // namespace wrapopt
