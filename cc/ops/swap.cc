#include "absl/status/status.h"
#include "cc/ops/contracts.h"
#include "cc/ops/inferred_inputs.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace wrapopt {
namespace {

using tensorflow::shape_inference::InferenceContext;

template <bool kRef>
absl::Status SwapShape(InferenceContext* c) {
  InferredInputs inputs(c, kRef);
  int a, b;
  TF_RETURN_IF_ERROR(inputs.FindVariables("a", "T", &a));
  TF_RETURN_IF_ERROR(inputs.FindVariables("b", "T", &b));
  for (int i = 0; i < b - a; ++i) {
    TF_RETURN_IF_ERROR(CheckSwap(inputs, a + i, b + i));
  }
  return absl::OkStatus();
}

constexpr char kSwapDoc[] = R"doc(
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
    .SetShapeFn(SwapShape<false>)
    .Doc(kSwapDoc);

// For the ref variables of TensorFlow 1 graphs.
REGISTER_OP("Wrapopt>ExchangeRef")
    .Input("a: Ref(N * T)")
    .Input("b: Ref(N * T)")
    .Attr("N: int >= 1")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(SwapShape<true>)
    .Doc(kSwapDoc);

}  // namespace wrapopt
