// Registers ops whose definitions are made by code.
#ifndef WRAPOPT_CC_OPS_REGISTRATION_H_
#define WRAPOPT_CC_OPS_REGISTRATION_H_

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def_builder.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace wrapopt {

inline bool Register(const tensorflow::OpDefBuilder& op) {
  tensorflow::OpRegistry::Global()->Register(
      [op](tensorflow::OpRegistrationData* data) { return op.Finalize(data); });
  return true;
}

// Registers a stateful op and its twin, with "Ref" after its name, for the ref
// variables of TensorFlow 1 graphs. `define` gets a builder; it and `shape` are
// told whether they are for the twin.
template <class Define>
bool RegisterWithRef(
    const char* name,
    absl::Status (*shape)(tensorflow::shape_inference::InferenceContext*, bool),
    Define define) {
  for (const bool ref : {false, true}) {
    tensorflow::OpDefBuilder op(absl::StrCat(name, ref ? "Ref" : ""));
    op.SetIsStateful();
    op.SetShapeFn([=](tensorflow::shape_inference::InferenceContext* c) {
      return shape(c, ref);
    });
    define(op, ref);
    Register(op);
  }
  return true;
}

}  // namespace wrapopt

#endif  // WRAPOPT_CC_OPS_REGISTRATION_H_
