// Functions by which kernels read scalar inputs, resources, number types and
// the instruction set.
#ifndef WRAPOPT_CC_KERNELS_INPUTS_H_
#define WRAPOPT_CC_KERNELS_INPUTS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cc/engine/isa.h"
#include "cc/engine/number.h"
#include "cc/ops/contracts.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/refcount.h"

namespace wrapopt {

// Reads the op's input `name`, which must be a scalar.
template <class Value>
absl::Status ReadScalar(tensorflow::OpKernelContext* ctx,
                        absl::string_view name, Value* value) {
  const tensorflow::Tensor* tensor;
  TF_RETURN_IF_ERROR(ctx->input(name, &tensor));
  TF_RETURN_IF_ERROR(CheckScalar(name, tensor->shape()));
  *value = tensor->scalar<Value>()();
  return absl::OkStatus();
}

// Finds the resource of the op's input `name`, a handle. `what` tells users
// what it must be.
template <class Resource>
absl::Status FindResource(
    tensorflow::OpKernelContext* ctx, absl::string_view name,
    absl::string_view what,
    tensorflow::core::RefCountPtr<Resource>* resource) {
  tensorflow::ResourceHandle handle;
  TF_RETURN_IF_ERROR(ReadScalar(ctx, name, &handle));
  const absl::Status found = LookupResource(ctx, handle, resource);
  if (found.ok()) return found;
  return absl::InvalidArgumentError(absl::StrCat(
      name, " must be ", what, " on this device: ", found.message()));
}

// The engine's name of a dtype that the ops' attributes allow.
inline Number NumberOf(tensorflow::DataType dtype) {
  switch (dtype) {
#define WRAPOPT_NUMBER_OF(number, storage, dtype, name, ffi) \
  case tensorflow::DT_##dtype:                               \
    return Number::number;
    WRAPOPT_NUMBERS(WRAPOPT_NUMBER_OF)
#undef WRAPOPT_NUMBER_OF
    default:
      return Number::kFloat;
  }
}

// The instruction set that the process uses.
inline absl::Status FindIsa(Isa* isa) {
  std::string error;
  if (ChosenIsa(isa, &error)) return absl::OkStatus();
  return absl::InvalidArgumentError(error);
}

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_INPUTS_H_
