#include "cc/ops/exchange.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/ops/inferred_inputs.h"
#include "tensorflow/core/framework/op.h"
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

template <bool kRef>
absl::Status ExchangeShape(InferenceContext* c) {
  InferredInputs inputs(c, kRef);
  int a, b;
  TF_RETURN_IF_ERROR(inputs.FindVariables("a", "T", &a));
  TF_RETURN_IF_ERROR(inputs.FindVariables("b", "T", &b));
  for (int i = 0; i < b - a; ++i) {
    TF_RETURN_IF_ERROR(CheckExchange(inputs, a + i, b + i));
  }
  return absl::OkStatus();
}

constexpr char kExchangeDoc[] = R"doc(
Exchanges the values of pairs of variables: a[i] <-> b[i].

The two exchange buffers, so the cost does not depend on their size and every
bit is kept. All variables are checked before any is changed.

a: N variables, all different and different from those in b.
b: N variables. b[i] has the dtype and shape of a[i].
)doc";

}  // namespace

REGISTER_OP("Wrapopt>Exchange")
    .Input("a: N * resource")
    .Input("b: N * resource")
    .Attr("N: int >= 1")
    .SetIsStateful()
    .SetShapeFn(ExchangeShape<false>)
    .Doc(kExchangeDoc);

// For the ref variables of TensorFlow 1 graphs.
REGISTER_OP("Wrapopt>ExchangeRef")
    .Input("a: Ref(N * T)")
    .Input("b: Ref(N * T)")
    .Attr("N: int >= 1")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(ExchangeShape<true>)
    .Doc(kExchangeDoc);

}  // namespace wrapopt
