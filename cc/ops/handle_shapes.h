// Shapes and dtypes of the variables of handles, for shape functions.
#ifndef WRAPOPT_CC_OPS_HANDLE_SHAPES_H_
#define WRAPOPT_CC_OPS_HANDLE_SHAPES_H_

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {

// The shape of the variable at input `input`, a handle or a ref.
inline tensorflow::shape_inference::ShapeHandle VariableShape(
    tensorflow::shape_inference::InferenceContext* c, int input, bool ref) {
  if (ref) return c->input(input);
  const auto* variable = c->input_handle_shapes_and_types(input);
  if (variable == nullptr || variable->empty()) return c->UnknownShape();
  return (*variable)[0].shape;
}

// The variable's dtype, or DT_INVALID if the handle does not have it.
inline tensorflow::DataType VariableDtype(
    tensorflow::shape_inference::InferenceContext* c, int input) {
  const auto* variable = c->input_handle_shapes_and_types(input);
  if (variable == nullptr || variable->empty()) return tensorflow::DT_INVALID;
  return (*variable)[0].dtype;
}

inline absl::Status CheckVariableDtype(
    tensorflow::shape_inference::InferenceContext* c, int input,
    const std::string& subject, tensorflow::DataType expected) {
  const tensorflow::DataType got = VariableDtype(c, input);
  if (got == expected || got == tensorflow::DT_INVALID) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(subject, " must be of dtype ",
                   tensorflow::DataTypeString(expected), ", got ",
                   tensorflow::DataTypeString(got)));
}

// The variable at `input` must have the shape of the one at `like`, if both
// shapes are known.
inline absl::Status CheckSameShape(
    tensorflow::shape_inference::InferenceContext* c, bool ref, int input,
    const std::string& subject, int like, const std::string& like_subject) {
  const auto got = VariableShape(c, input, ref);
  const auto expected = VariableShape(c, like, ref);
  tensorflow::shape_inference::ShapeHandle merged;
  if (c->Merge(got, expected, &merged).ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(subject, " misshapen: got ", c->DebugString(got),
                   " but expected ", c->DebugString(expected),
                   " (the shape of ", like_subject, ")"));
}

}  // namespace wrapopt

#endif  // WRAPOPT_CC_OPS_HANDLE_SHAPES_H_
