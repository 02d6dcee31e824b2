#include "cc/ops/exchange.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/ops/inferred_inputs.h"
#include "cc/ops/registration.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/errors.h"

namespace wrapopt {

using tensorflow::DataType;
using tensorflow::DataTypeString;
using tensorflow::shape_inference::InferenceContext;

absl::Status CheckExchange(const CheckedVariables& variables, int a, int b) {
  const DataType got = variables.known_dtype(b);
  const DataType expected = variables.known_dtype(a);
  if (IsKnown(got) && IsKnown(expected) && got != expected) {
    return absl::InvalidArgumentError(absl::StrCat(
        variables.Describe(b), " must be of dtype ", DataTypeString(expected),
        " (the dtype of ", variables.Describe(a), "), got ",
        DataTypeString(got), ": buffers are exchanged, not converted"));
  }
  if (IsKnown(expected) && !tensorflow::DataTypeCanUseMemcpy(expected)) {
    return absl::InvalidArgumentError(
        absl::StrCat(variables.Describe(a), " must be of a numeric dtype, got ",
                     DataTypeString(expected)));
  }
  return variables.CheckSameShape(b, a);
}

namespace {

absl::Status ExchangeShape(InferenceContext* c, bool ref) {
  InferredInputs inputs(c, ref);
  int a, b;
  TF_RETURN_IF_ERROR(inputs.FindVariables("a", "T", &a));
  TF_RETURN_IF_ERROR(inputs.FindVariables("b", "T", &b));
  for (int i = 0; i < b - a; ++i) {
    TF_RETURN_IF_ERROR(CheckExchange(inputs, a + i, b + i));
  }
  return absl::OkStatus();
}

}  // namespace

const bool exchange_defined = RegisterWithRef(
    "Wrapopt>Exchange", ExchangeShape, [](auto& op, bool ref) {
      op.Input(ref ? "a: Ref(N * T)" : "a: N * resource");
      op.Input(ref ? "b: Ref(N * T)" : "b: N * resource");
      op.Attr("N: int >= 1");
      if (ref) op.Attr("T: type");
      op.Doc(R"doc(
Exchanges the values of pairs of variables: a[i] <-> b[i].

The two exchange buffers, so the cost does not depend on their size and every
bit is kept. All variables are checked before any is changed.

a: N variables, all different and different from those in b.
b: N variables. b[i] has the dtype and shape of a[i].
)doc");
    });

}  // namespace wrapopt
