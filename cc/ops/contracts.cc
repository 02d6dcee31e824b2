#include "cc/ops/contracts.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/platform/errors.h"

namespace wrapopt {

using tensorflow::DataType;
using tensorflow::DataTypeString;
using tensorflow::PartialTensorShape;

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

std::string OrFloat(DataType dtype) {
  const bool low = dtype != tensorflow::DT_FLOAT &&
                   FitsLowPrecision(tensorflow::DT_FLOAT, dtype);
  return low ? ", or float" : "";
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
  if (got == dtype || !IsKnown(got)) return absl::OkStatus();
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

}  // namespace wrapopt
