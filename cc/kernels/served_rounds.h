// Functions that the kernels of served averaging rounds share.
#ifndef WRAPOPT_CC_KERNELS_SERVED_ROUNDS_H_
#define WRAPOPT_CC_KERNELS_SERVED_ROUNDS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/engine/isa.h"
#include "cc/engine/served_rounds.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/rounds_resource.h"
#include "cc/ops/averaging_rounds.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::tstring;

inline absl::Status FindServed(OpKernelContext* ctx, RoundsPtr* rounds) {
  TF_RETURN_IF_ERROR(FindRounds(ctx, rounds));
  if ((*rounds)->served() != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat((*rounds)->rounds()->subject(),
                   " must have settings for this op, got none: only served ",
                   "rounds have a center"));
}

inline absl::Status ReadWorker(OpKernelContext* ctx, std::string* worker) {
  tstring name;
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "worker", &name));
  *worker = name;
  return absl::OkStatus();
}

inline absl::Status ReadPlace(OpKernelContext* ctx, Place* place) {
  TF_RETURN_IF_ERROR(ReadRound(ctx, &place->round));
  return ReadScalar(ctx, "generation", &place->generation);
}

inline absl::Status ReadTurns(OpKernelContext* ctx, Turns* turns) {
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "newest", &turns->newest));
  const Tensor* alive;
  TF_RETURN_IF_ERROR(ctx->input("turns", &alive));
  TF_RETURN_IF_ERROR(CheckTurns(alive->shape()));
  const auto numbers = alive->vec<int64_t>();
  turns->alive = {numbers.data(), numbers.data() + numbers.size()};
  return absl::OkStatus();
}

template <class Value>
absl::Status WriteScalar(OpKernelContext* ctx, const char* name,
                         const Value& value) {
  Tensor* output;
  TF_RETURN_IF_ERROR(ctx->allocate_output(name, {}, &output));
  output->scalar<Value>()() = value;
  return absl::OkStatus();
}

inline absl::Status WriteWorkers(OpKernelContext* ctx,
                                 const std::vector<std::string>& workers) {
  Tensor* output;
  const int64_t m = workers.size();
  TF_RETURN_IF_ERROR(ctx->allocate_output("workers", {m}, &output));
  std::copy(workers.begin(), workers.end(), output->flat<tstring>().data());
  return absl::OkStatus();
}

inline absl::Status WriteTurns(OpKernelContext* ctx, const Turns& turns) {
  Tensor* output;
  const int64_t t = turns.alive.size();
  TF_RETURN_IF_ERROR(ctx->allocate_output("turns", {t}, &output));
  std::copy(turns.alive.begin(), turns.alive.end(),
            output->flat<int64_t>().data());
  return WriteScalar(ctx, "newest", turns.newest);
}

inline absl::Status Zeros(OpKernelContext* ctx, tensorflow::DataType dtype,
                          const tensorflow::TensorShape& shape, Tensor* zeros) {
  TF_RETURN_IF_ERROR(ctx->allocate_temp(dtype, shape, zeros));
  if (zeros->TotalBytes() > 0) {
    std::memset(zeros->data(), 0, zeros->TotalBytes());
  }
  return absl::OkStatus();
}

// Moves the mean by the values that members have brought. Needs center->mu.
absl::Status AddToMean(OpKernelContext* ctx, Isa isa,
                       ServedTensorRounds* rounds, Center* center);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_SERVED_ROUNDS_H_
