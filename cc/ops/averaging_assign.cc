#include <vector>

#include "absl/status/status.h"
#include "cc/ops/contracts.h"
#include "cc/ops/inferred_inputs.h"
#include "cc/ops/number_types.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::PartialTensorShape;
using tensorflow::shape_inference::InferenceContext;

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

constexpr char kAveragingAssignDoc[] = R"doc(
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
    .Attr("T: " WRAPOPT_NUMBER_TYPES)
    .Attr("V: list(" WRAPOPT_NUMBER_TYPES ") >= 0")
    .Attr("use_locking: bool = true")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      return AveragingAssignShape(c, false);
    })
    .Doc(kAveragingAssignDoc);

// For the ref variables of TensorFlow 1 graphs.
REGISTER_OP("Wrapopt>AveragingAssignRef")
    .Input("targets: Ref(TT)")
    .Input("sources: Ref(ST)")
    .Input("tensors: V")
    .Input("weights: double")
    .Input("rate: double")
    .Attr("N: int >= 1")
    .Attr("T: " WRAPOPT_NUMBER_TYPES)
    .Attr("TT: list(" WRAPOPT_NUMBER_TYPES ") >= 1")
    .Attr("ST: list(" WRAPOPT_NUMBER_TYPES ") >= 0")
    .Attr("V: list(" WRAPOPT_NUMBER_TYPES ") >= 0")
    .Attr("use_locking: bool = true")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      return AveragingAssignShape(c, true);
    })
    .Doc(kAveragingAssignDoc);

}  // namespace wrapopt
