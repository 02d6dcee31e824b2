// Functions by which kernels read scalar inputs, number types and the
// instruction set.
#ifndef WRAPOPT_CC_KERNELS_INPUTS_H_
#define WRAPOPT_CC_KERNELS_INPUTS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cc/engine/isa.h"
#include "cc/engine/number.h"
#include "cc/ops/contracts.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/errors.h"

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
