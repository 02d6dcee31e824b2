// The checks of an op's shadows and decays while a graph is built.
#ifndef WRAPOPT_CC_OPS_SHADOWS_H_
#define WRAPOPT_CC_OPS_SHADOWS_H_

#include <string>

#include "absl/status/status.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {

// Whether what belongs to a variable of `dtype` may be of `other`: the same, or
// float for half and bfloat16.
bool FitsLowPrecision(tensorflow::DataType other, tensorflow::DataType dtype);

// `shadows`, `values` and `decays` are the first inputs of each; `decays` is -1
// for an op without.
absl::Status CheckShadows(tensorflow::shape_inference::InferenceContext* c,
                          bool ref, int shadows, int values,
                          const std::string& values_name, int decays);

// Of an op with attribute NL, `log_decays` being the first of that input: none,
// or one for each shadow, of as many numbers as its value has rows, and one.
absl::Status CheckLogDecays(tensorflow::shape_inference::InferenceContext* c,
                            int values, int log_decays);

// Input number `indices` is indices[i], the rows of the `i`-th of `values_name`.
absl::Status CheckIndices(tensorflow::shape_inference::InferenceContext* c,
                          int i, int indices,
                          tensorflow::shape_inference::ShapeHandle value,
                          const std::string& values_name);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_OPS_SHADOWS_H_
