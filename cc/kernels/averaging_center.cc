// Wrapopt>AveragingOuterStep, Restore and Center: the center that averaging
// rounds hold.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>  // NOLINT(build/c++11)
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/engine/codes.h"
#include "cc/engine/elementwise.h"
#include "cc/engine/isa.h"
#include "cc/engine/number.h"
#include "cc/kernels/codes.h"
#include "cc/kernels/function_kernel.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/registration.h"
#include "cc/kernels/rounds_resource.h"
#include "cc/kernels/threads.h"
#include "cc/protocols/rounds.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::DataTypeString;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// Makes `count` tensors like those of the center nobody else's: zeros if there
// are none.
absl::Status MakeOwn(OpKernelContext* ctx, size_t count, const Center& center,
                     std::vector<Tensor>* tensors) {
  const bool has_none = tensors->size() != count;
  std::vector<Tensor> zeros(count);
  for (size_t i = 0; i < count; ++i) {
    const Tensor& like = center.values[i];
    TF_RETURN_IF_ERROR(has_none
                           ? Zeros(ctx, like.dtype(), like.shape(), &zeros[i])
                           : Own(ctx, (*tensors)[i], &(*tensors)[i]));
  }
  if (has_none) *tensors = std::move(zeros);
  return absl::OkStatus();
}

// Makes room to step `outer` values, and to move all of them if codes travel.
absl::Status MakeRoom(OpKernelContext* ctx, size_t outer,
                      const std::optional<Code>& travels, Center* center) {
  const size_t n = center->values.size();
  for (size_t i = 0; i < (travels ? n : outer); ++i) {
    TF_RETURN_IF_ERROR(Own(ctx, center->values[i], &center->values[i]));
  }
  TF_RETURN_IF_ERROR(MakeOwn(ctx, outer, *center, &center->velocities));
  if (!travels) return absl::OkStatus();
  TF_RETURN_IF_ERROR(MakeOwn(ctx, n, *center, &center->errors));
  std::vector<Tensor> codes(n);
  for (size_t i = 0; i < n; ++i) {
    const int64_t bytes = CodeBytes(*travels, center->values[i].NumElements());
    TF_RETURN_IF_ERROR(
        ctx->allocate_temp(tensorflow::DT_UINT8, {bytes}, &codes[i]));
  }
  center->codes = std::move(codes);
  return absl::OkStatus();
}

// One pass over memory. D = center - mean in the scratch array, which is the
// gradient of a step with Nesterov's momentum.
absl::Status OuterStepOf(OpKernelContext* ctx, double lr, double momentum,
                         const Tensor& mean, Tensor* center, Tensor* velocity,
                         Isa isa) {
  const Number number = NumberOf(center->dtype());
  const size_t bytes = SizeOf(number);
  const double plus[] = {1, 1}, minus[] = {-1, 0}, step[] = {lr, momentum, 1};
  Pass pass(number);
  const RuleStep sum = FindStep(RuleId::kWeightedSum, number, number, isa);
  pass.AddStage({sum, plus, 2, bytes, /*new_inputs=*/true, /*scratch=*/0});
  pass.AddStage({sum, minus, 2, bytes, /*new_inputs=*/true, /*scratch=*/0});
  pass.AddStage({FindStep(RuleId::kMomentum, number, number, isa), step, 3,
                 3 * bytes, /*new_inputs=*/false, /*scratch=*/2});
  pass.AddVariable(center->NumElements(),
                   {nullptr, center->data(), nullptr, mean.data(),
                    center->data(), velocity->data(), nullptr});
  return RunPass(ctx, pass);
}

// Moves value i by the code of an update and of what the last code has lost.
void Move(OpKernelContext* ctx, Code code, const Tensor& update, size_t i,
          Center* center, Isa isa) {
  Encode(ctx, code, isa, update,
         static_cast<float*>(center->errors[i].data()), &center->codes[i]);
  Decode(ctx, code, isa, center->values[i], center->codes[i], /*rate=*/nullptr,
         &center->values[i]);
}

absl::Status OuterStep(OpKernelContext* ctx, RoundsResource* resource,
                       double lr, double momentum, int64_t stepped, Isa isa) {
  Center* const center = resource->center();
  const std::optional<Code>& travels = resource->options().travels;
  const size_t n = center->values.size();
  center->codes.clear();
  // No member had values.
  if (n > 0 && center->weight == 0) return absl::OkStatus();
  // With these, the center becomes the mean.
  const bool is_mean = lr == 1 && momentum == 0;
  const size_t outer =
      is_mean ? 0 : std::clamp<int64_t>(stepped, 0, static_cast<int64_t>(n));
  if (n == 0 || center->mean.size() != n) {
    return absl::FailedPreconditionError(absl::StrCat(
        resource->rounds()->subject(),
        " must have a center and a mean before the step, got ", n, " and ",
        center->mean.size(), " values"));
  }
  // All memory first: a failure changes nothing.
  TF_RETURN_IF_ERROR(MakeRoom(ctx, outer, travels, center));
  std::vector<Tensor> updates;  // The mean is that of ways from 0.
  if (travels) TF_RETURN_IF_ERROR(MakeOwn(ctx, outer, *center, &updates));
  for (size_t i = 0; i < n; ++i) {
    if (travels) {
      if (i < outer) {
        TF_RETURN_IF_ERROR(OuterStepOf(ctx, lr, momentum, center->mean[i],
                                       &updates[i], &center->velocities[i],
                                       isa));
      }
      Move(ctx, *travels, i < outer ? updates[i] : center->mean[i], i, center,
           isa);
    } else if (i >= outer) {
      center->values[i] = std::move(center->mean[i]);
    } else {
      TF_RETURN_IF_ERROR(OuterStepOf(ctx, lr, momentum, center->mean[i],
                                     &center->values[i], &center->velocities[i],
                                     isa));
    }
  }
  center->ForgetMean();
  return absl::OkStatus();
}

absl::Status AveragingOuterStep(OpKernelContext* ctx, Isa isa) {
  RoundsPtr resource;
  Known known;
  double lr, momentum;
  int64_t stepped;
  TF_RETURN_IF_ERROR(FindRounds(ctx, &resource));
  TF_RETURN_IF_ERROR(ReadKnown(ctx, &known));
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "learning_rate", &lr));
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "momentum", &momentum));
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "stepped", &stepped));
  if (!(lr > 0 && std::isfinite(lr))) {
    return absl::InvalidArgumentError(absl::StrCat(
        "learning_rate must be finite and greater than 0, got ", lr));
  }
  if (!(momentum >= 0 && momentum < 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("momentum must be in [0, 1), got ", momentum));
  }

  TensorRounds* const rounds = resource->rounds();
  Center* const center = resource->center();
  TensorRounds::Deferred after(rounds);
  std::lock_guard<std::mutex> lock(center->mu);
  bool is_open;
  TF_RETURN_IF_ERROR(ToStatus(rounds->CheckClosed(known, &is_open)));
  if (is_open) {
    TF_RETURN_IF_ERROR(AddToMean(ctx, isa, resource.get()));
    TF_RETURN_IF_ERROR(
        OuterStep(ctx, resource.get(), lr, momentum, stepped, isa));
    TF_RETURN_IF_ERROR(ToStatus(rounds->Next(&after)));
  }
  TF_RETURN_IF_ERROR(WritePlace(ctx, rounds->known().place));
  return absl::OkStatus();
}

absl::Status AveragingRestore(OpKernelContext* ctx) {
  RoundsPtr resource;
  TF_RETURN_IF_ERROR(FindRounds(ctx, &resource));
  std::string worker;
  int64_t from, job;
  Place place;
  TF_RETURN_IF_ERROR(ReadWorker(ctx, &worker));
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "from_generation", &from));
  TF_RETURN_IF_ERROR(ReadPlace(ctx, &place));
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "job", &job));
  const int64_t least = resource->options().holds_center ? 0 : -1;
  if (place.round < least) {
    return absl::InvalidArgumentError(
        absl::StrCat("round must be at least ", least, ", got ", place.round));
  }
  Center* const center = resource->center();
  TensorRounds::Deferred after(resource->rounds());
  std::lock_guard<std::mutex> lock(center->mu);
  std::vector<Tensor> values;
  bool restored;
  TF_RETURN_IF_ERROR(ToStatus(resource->rounds()->Restore(
      worker, from, place, resource->options().holds_center, &values, &restored,
      &after)));
  if (restored) {
    center->ForgetMean();
    center->codes.clear();
    center->job = job;
  }
  if (!values.empty()) {
    const int64_t n = resource->options().num_vectors();
    const int64_t all = values.size();
    const auto errors = values.begin() + n;
    const auto velocities =
        errors + (resource->options().travels && all > n ? n : 0);
    center->errors.assign(errors, velocities);
    center->velocities.assign(velocities, values.end());
    values.resize(n);
    center->values = std::move(values);
  }
  TF_RETURN_IF_ERROR(WriteScalar(ctx, "restored", restored));
  return absl::OkStatus();
}

class AveragingCenterOp : public AsyncOpKernel {
 public:
  explicit AveragingCenterOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("what", &what_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const auto read = [ctx](const TensorRounds&, RoundWait* wait) {
      wait->what = RoundWait::For::kRead;
      return ReadWorker(ctx, &wait->worker);
    };
    Wait(ctx, std::move(done), read,
         [this, ctx](const Known&) { return Read(ctx); });
  }

 private:
  absl::Status Read(OpKernelContext* ctx) const {
    RoundsPtr resource;
    int64_t index, count;
    TF_RETURN_IF_ERROR(FindRounds(ctx, &resource));
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "index", &index));
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "count", &count));
    Center* const center = resource->center();
    std::lock_guard<std::mutex> lock(center->mu);
    const std::vector<Tensor>& values =
        what_ == "velocities" ? center->velocities
        : what_ == "errors"   ? center->errors
        : what_ == "codes"    ? center->codes
                              : center->values;
    const std::string subject = absl::StrCat(
        "the ", what_, " of ", resource->rounds()->subject());
    const int64_t n = values.size();
    if (index < 0 || index >= n) {
      return absl::FailedPreconditionError(
          absl::StrCat("index must be less than ", n,
                       ", the number of values of ", subject, ", got ", index));
    }
    if (count < 1 || count > n - index) {
      return absl::InvalidArgumentError(
          absl::StrCat("count must be in [1, ", n - index, "] at index ", index,
                       " of ", n, " values of ", subject, ", got ", count));
    }
    int64_t elements = 0;
    for (int64_t i = index; i < index + count; ++i) {
      if (values[i].dtype() != dtype_) {
        return absl::InvalidArgumentError(
            absl::StrCat("T must be ", DataTypeString(values[i].dtype()),
                         ", the dtype of value ", i, " of ", subject, ", got ",
                         DataTypeString(dtype_)));
      }
      elements += values[i].NumElements();
    }
    TF_RETURN_IF_ERROR(WritePlace(ctx, resource->rounds()->known().place));
    Tensor* output;
    TF_RETURN_IF_ERROR(ctx->allocate_output("value", {elements}, &output));
    char* to = static_cast<char*>(output->data());
    for (int64_t i = index; i < index + count; ++i) {
      const size_t bytes = values[i].TotalBytes();
      if (bytes > 0) std::memcpy(to, values[i].data(), bytes);
      to += bytes;
    }
    return absl::OkStatus();
  }

  tensorflow::DataType dtype_;
  std::string what_;
};

WRAPOPT_REGISTER_CPU("AveragingOuterStep", FunctionKernel<AveragingOuterStep>);
WRAPOPT_REGISTER_CPU("AveragingRestore", FunctionKernel<AveragingRestore>);
WRAPOPT_REGISTER_CPU("AveragingCenter", AveragingCenterOp);

}  // namespace
}  // namespace wrapopt
