#include "cc/ops/inferred_inputs.h"

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/platform/errors.h"

namespace wrapopt {

using tensorflow::DataType;
using tensorflow::PartialTensorShape;
using tensorflow::shape_inference::ShapeHandle;

PartialTensorShape InferredInputs::ShapeOf(ShapeHandle shape) const {
  if (!c_->RankKnown(shape)) return PartialTensorShape();
  std::vector<int64_t> sizes;
  for (int d = 0; d < c_->Rank(shape); ++d) {
    sizes.push_back(c_->Value(c_->Dim(shape, d)));
  }
  PartialTensorShape known;
  // A shape of too many elements is TensorFlow's to refuse.
  PartialTensorShape::BuildPartialTensorShape(sizes, &known).IgnoreError();
  return known;
}

absl::Status InferredInputs::Count(const char* name, int* count) const {
  std::vector<ShapeHandle> shapes;
  TF_RETURN_IF_ERROR(c_->input(name, &shapes));
  *count = shapes.size();
  return absl::OkStatus();
}

absl::Status InferredInputs::FindVariables(const char* list,
                                           const char* dtypes, int* first) {
  int count;
  TF_RETURN_IF_ERROR(Count(list, &count));
  std::vector<DataType> of_refs;
  if (ref_ && dtypes != nullptr) {
    if (DataType dtype; c_->GetAttr(dtypes, &dtype).ok()) {
      of_refs.assign(count, dtype);
    } else {
      TF_RETURN_IF_ERROR(c_->GetAttr(dtypes, &of_refs));
    }
  }
  of_refs.resize(count, tensorflow::DT_INVALID);
  *first = variables_.size();
  for (int i = 0; i < count; ++i, ++next_) {
    if (ref_) {
      variables_.push_back({list, i, of_refs[i], ShapeOf(c_->input(next_))});
      continue;
    }
    const auto* variable = c_->input_handle_shapes_and_types(next_);
    if (variable == nullptr || variable->empty()) {
      variables_.push_back({list, i, tensorflow::DT_INVALID, {}});
    } else {
      variables_.push_back(
          {list, i, (*variable)[0].dtype, ShapeOf((*variable)[0].shape)});
    }
  }
  return absl::OkStatus();
}

absl::Status InferredInputs::FindVariables(
    const std::vector<VariableList>& lists) {
  int inputs, first;
  TF_RETURN_IF_ERROR(Count("variables", &inputs));
  int64_t found = 0;
  for (int i = 0; i < inputs && found >= 0; ++i) {
    const int64_t handles =
        ref_ ? 1 : ShapeOf(c_->input(next_ + i)).num_elements();
    found = handles < 0 ? -1 : found + handles;
  }
  if (found >= 0) TF_RETURN_IF_ERROR(CheckCount(lists, found));
  TF_RETURN_IF_ERROR(FindVariables("variables", "V", &first));
  // Several handles in one tensor do not tell their variables.
  if (found != inputs) variables_.resize(first);
  for (const VariableList& list : lists) {
    for (int i = 0; i < list.count; ++i, ++first) {
      if (found != inputs) {
        variables_.push_back({{}, 0, tensorflow::DT_INVALID, {}});
      }
      variables_[first].list = list.name;
      variables_[first].position = i;
    }
  }
  return absl::OkStatus();
}

absl::Status InferredInputs::FindTensors(
    const char* list, std::vector<PartialTensorShape>* shapes) {
  int count;
  TF_RETURN_IF_ERROR(Count(list, &count));
  for (int i = 0; i < count; ++i, ++next_) {
    shapes->push_back(ShapeOf(c_->input(next_)));
  }
  return absl::OkStatus();
}

absl::Status InferredInputs::FindTensor(const char* name,
                                        PartialTensorShape* shape) {
  std::vector<PartialTensorShape> shapes;
  TF_RETURN_IF_ERROR(FindTensors(name, &shapes));
  *shape = shapes[0];
  return absl::OkStatus();
}

absl::Status InferredInputs::FindScalar(const char* name) {
  PartialTensorShape shape;
  TF_RETURN_IF_ERROR(FindTensor(name, &shape));
  return CheckScalar(name, shape);
}

absl::Status InferredInputs::FindDecays(const ShadowContract& averages) {
  PartialTensorShape decays;
  TF_RETURN_IF_ERROR(FindTensor("decays", &decays));
  return averages.CheckDecays(decays, Constant());
}

std::string InferredInputs::Describe(int variable) const {
  const Variable& of = variables_[variable];
  return absl::StrCat(of.list, "[", of.position, "]");
}

}  // namespace wrapopt
