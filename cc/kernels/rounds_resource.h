// The rounds of model averaging as a resource of TensorFlow, with the center of
// served rounds, and what their kernels share.
#ifndef WRAPOPT_CC_KERNELS_ROUNDS_RESOURCE_H_
#define WRAPOPT_CC_KERNELS_ROUNDS_RESOURCE_H_

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>  // NOLINT(build/c++11)
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/engine/deadline_timer.h"
#include "cc/engine/rounds.h"
#include "cc/engine/served_rounds.h"
#include "cc/kernels/inputs.h"
#include "cc/ops/averaging_rounds.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/platform/tstring.h"

namespace wrapopt {

using TensorRounds = Rounds<tensorflow::Tensor>;
using ServedTensorRounds = ServedRounds<tensorflow::Tensor>;

// A server's part of the center. All tensors are vectors of float or double.
struct Center {
  std::mutex mu;  // Held while a round ends.
  // Empty until the first Restore.
  std::vector<tensorflow::Tensor> values;
  // One for each value that takes outer steps; these values come first. Without
  // velocities, the next outer step starts with a velocity of 0.
  std::vector<tensorflow::Tensor> velocities;
  // The weighted mean of the members' values, empty without any, and the sum of
  // their weights.
  std::vector<tensorflow::Tensor> mean;
  double weight = 0;

  void ForgetMean() {
    mean.clear();
    weight = 0;
  }
  void Forget() {
    ForgetMean();
    values.clear();
    velocities.clear();
  }
};

// A wait does not keep the rounds alive. Their deletion ends the wait.
class RoundsResource : public tensorflow::ResourceBase {
 public:
  // `settings` is empty if the rounds are not served.
  RoundsResource(const std::string& name, int64_t num_workers,
                 std::string settings)
      : settings_(std::move(settings)) {
    Timer* const timer = &DeadlineTimer::Get();
    const auto warn = [](const std::string& text) { LOG(WARNING) << text; };
    if (settings_.empty()) {
      rounds_ = std::make_shared<TensorRounds>(name, num_workers, timer, warn);
      return;
    }
    auto served = std::make_shared<ServedTensorRounds>(name, num_workers, timer,
                                                       warn);
    served_ = served.get();
    rounds_ = std::move(served);
  }
  ~RoundsResource() override { rounds_->End(); }

  std::string DebugString() const override { return rounds_->subject(); }

  const std::string& settings() const { return settings_; }
  const std::shared_ptr<TensorRounds>& rounds() const { return rounds_; }
  // nullptr if they are not served.
  ServedTensorRounds* served() const { return served_; }
  Center* center() { return &center_; }

 private:
  const std::string settings_;
  std::shared_ptr<TensorRounds> rounds_;
  ServedTensorRounds* served_ = nullptr;
  Center center_;
};

using RoundsPtr = tensorflow::core::RefCountPtr<RoundsResource>;

inline absl::Status FindRounds(tensorflow::OpKernelContext* ctx,
                               RoundsPtr* rounds) {
  return FindResource(ctx, "rounds", "those of Wrapopt>AveragingRounds",
                      rounds);
}

inline absl::Status ToStatus(const RoundsStatus& status) {
  using Code = RoundsStatus::Code;
  switch (status.code) {
    case Code::kOk:
      return absl::OkStatus();
    case Code::kAborted:
      return absl::AbortedError(status.message);
    case Code::kCancelled:
      return absl::CancelledError(status.message);
    case Code::kDeadlineExceeded:
      return absl::DeadlineExceededError(status.message);
    case Code::kFailedPrecondition:
      return absl::FailedPreconditionError(status.message);
    case Code::kInvalidArgument:
      return absl::InvalidArgumentError(status.message);
  }
  return absl::InternalError(status.message);
}

// A tensor that nobody else reads, with the elements of `from`.
inline absl::Status Own(tensorflow::OpKernelContext* ctx,
                        const tensorflow::Tensor& from,
                        tensorflow::Tensor* to) {
  if (from.RefCountIsOne()) {
    *to = from;
    return absl::OkStatus();
  }
  tensorflow::Tensor copy;
  TF_RETURN_IF_ERROR(ctx->allocate_temp(from.dtype(), from.shape(), &copy));
  if (from.TotalBytes() > 0) {
    std::memcpy(copy.data(), from.data(), from.TotalBytes());
  }
  *to = std::move(copy);
  return absl::OkStatus();
}

// Ends the wait if the op's step ends.
inline void WatchStep(tensorflow::OpKernelContext* ctx,
                      TensorRounds::Wait* wait) {
  tensorflow::CancellationManager* const manager = ctx->cancellation_manager();
  if (manager == nullptr) return;
  const auto token = manager->get_cancellation_token();
  wait->watch = [manager, token](std::function<void()> ended) {
    return manager->RegisterCallback(token, std::move(ended));
  };
  wait->unwatch = [manager, token] { manager->DeregisterCallback(token); };
}

inline absl::Status ReadRound(tensorflow::OpKernelContext* ctx,
                              int64_t* round) {
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "round", round));
  // Round + 1 must not overflow.
  if (*round < kLastRound) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("round must be less than 2^63 - 1, got ", *round));
}

inline absl::Status ReadTimeout(tensorflow::OpKernelContext* ctx,
                                double* timeout_secs) {
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "timeout_secs", timeout_secs));
  return CheckTimeout(*timeout_secs);
}

// Reads the op's input "workers", which must name each worker once.
inline absl::Status ReadWorkers(tensorflow::OpKernelContext* ctx,
                                std::vector<std::string>* workers) {
  const tensorflow::Tensor* tensor;
  TF_RETURN_IF_ERROR(ctx->input("workers", &tensor));
  TF_RETURN_IF_ERROR(CheckWorkers(tensor->shape()));
  const auto names = tensor->vec<tensorflow::tstring>();
  std::set<std::string> seen;
  for (int64_t w = 0; w < names.size(); ++w) {
    workers->push_back(names(w));
    if (!seen.insert(workers->back()).second) {
      return absl::InvalidArgumentError(absl::StrCat(
          "workers must name each worker once, got '", workers->back(),
          "' twice"));
    }
  }
  return absl::OkStatus();
}

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_ROUNDS_RESOURCE_H_
