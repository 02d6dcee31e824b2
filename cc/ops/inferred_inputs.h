// The inputs of an op in its shape function: as much of them as the rules of
// contracts.h need.
#ifndef WRAPOPT_CC_OPS_INFERRED_INPUTS_H_
#define WRAPOPT_CC_OPS_INFERRED_INPUTS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cc/ops/averages.h"
#include "cc/ops/contracts.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {

// A shape function asks for all inputs of its op, in their order.
class InferredInputs final : public CheckedVariables {
 public:
  // `ref`: whether the op takes variables by ref, else by handle.
  explicit InferredInputs(tensorflow::shape_inference::InferenceContext* c,
                          bool ref = false)
      : c_(c), ref_(ref) {}

  // The variables of one input list. Their positions in all calls of this class
  // are `*first` + position in the list. A handle knows its variable's dtype.
  // The dtypes of refs, a list or one for all, are the attribute `dtypes`, if
  // it is given.
  absl::Status FindVariables(const char* list, const char* dtypes, int* first);

  // The variables of the input "variables". It cannot tell them if a tensor
  // may hold any number of handles. The dtypes of refs are the attribute V.
  absl::Status FindVariables(const std::vector<VariableList>& lists);

  absl::Status FindTensors(const char* list,
                           std::vector<tensorflow::PartialTensorShape>* shapes);
  absl::Status FindTensor(const char* name,
                          tensorflow::PartialTensorShape* shape);
  // One that must be a scalar.
  absl::Status FindScalar(const char* name);
  // The input "decays", checked, its value too if that is a constant.
  absl::Status FindDecays(const ShadowContract& averages);
  // The last one that was found, if it is a constant; else nullptr.
  const tensorflow::Tensor* Constant() { return c_->input_tensor(next_ - 1); }

  std::string Describe(int variable) const override;
  tensorflow::DataType known_dtype(int variable) const override {
    return variables_[variable].dtype;
  }
  const tensorflow::PartialTensorShape& known_shape(
      int variable) const override {
    return variables_[variable].shape;
  }
  int Written(int) const override { return -1; }

 private:
  struct Variable {
    absl::string_view list;
    int position;
    tensorflow::DataType dtype;
    tensorflow::PartialTensorShape shape;
  };

  tensorflow::PartialTensorShape ShapeOf(
      tensorflow::shape_inference::ShapeHandle shape) const;
  // The number of inputs of that name, which are the next.
  absl::Status Count(const char* name, int* count) const;

  tensorflow::shape_inference::InferenceContext* const c_;
  const bool ref_;
  int next_ = 0;  // Input.
  std::vector<Variable> variables_;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_OPS_INFERRED_INPUTS_H_
