// The checks of an op's shadows and decays in shape functions.
#ifndef WRAPOPT_CC_OPS_SHADOWS_H_
#define WRAPOPT_CC_OPS_SHADOWS_H_

#include <string>

#include "absl/status/status.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {

// Whether gradients, shadows or sources of a variable of dtype `dtype` may have
// dtype `other`: the same, or float for half and bfloat16.
bool FitsLowPrecision(tensorflow::DataType other, tensorflow::DataType dtype);

// `shadows`, `values` and `decays` are the numbers of their first inputs;
// `decays` is -1 for an op without decays.
absl::Status CheckShadows(tensorflow::shape_inference::InferenceContext* c,
                          bool ref, int shadows, int values,
                          const std::string& values_name, int decays);

// For an op with attribute NL, whose input number `log_decays` is the first of
// the list: the list must be empty or have one variable for each shadow, with a
// number for each row of its value and one more.
absl::Status CheckLogDecays(tensorflow::shape_inference::InferenceContext* c,
                            int values, int log_decays);

// Checks input number `indices`, which is indices[i]: the rows of
// `values_name`[i].
absl::Status CheckIndices(tensorflow::shape_inference::InferenceContext* c,
                          int i, int indices,
                          tensorflow::shape_inference::ShapeHandle value,
                          const std::string& values_name);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_OPS_SHADOWS_H_
