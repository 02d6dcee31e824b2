// Averaging rounds as a resource of TensorFlow, and what their kernels share.
#ifndef WRAPOPT_CC_KERNELS_ROUNDS_RESOURCE_H_
#define WRAPOPT_CC_KERNELS_ROUNDS_RESOURCE_H_

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>  // NOLINT(build/c++11)
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/engine/codes.h"
#include "cc/engine/isa.h"
#include "cc/kernels/inputs.h"
#include "cc/ops/averaging_rounds.h"
#include "cc/protocols/deadline_timer.h"
#include "cc/protocols/rounds.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/logging.h"

namespace wrapopt {

using TensorRounds = Rounds<tensorflow::Tensor>;

// A server's part of the center. All tensors are vectors of float or double.
struct Center {
  std::mutex mu;  // Held while a round ends.
  // Empty until the first Restore.
  std::vector<tensorflow::Tensor> values;
  // One for each value that takes outer steps; these values come first. Without
  // velocities, the next outer step starts with a velocity of 0.
  std::vector<tensorflow::Tensor> velocities;
  // If codes travel: what the codes of the values have lost, one for each
  // value, or none for zeros; and the codes of the last round's updates, none
  // if it had no update or a worker has given the center.
  std::vector<tensorflow::Tensor> errors;
  std::vector<tensorflow::Tensor> codes;
  // The job that trains it; 0 if that is not known.
  int64_t job = 0;
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
    for (auto* const tensors : {&values, &velocities, &errors, &codes}) {
      tensors->clear();
    }
  }
};

// The attributes of Wrapopt>AveragingRounds.
struct RoundsOptions {
  int64_t num_workers;
  tensorflow::DataTypeVector dtypes;
  std::vector<int64_t> sizes;
  bool holds_center;
  std::optional<Code> travels;  // What workers send and take.
  std::string settings;

  int64_t num_vectors() const { return dtypes.size(); }

  // What differs from other options, of these and of the others; ("", "") if
  // nothing does.
  std::pair<std::string, std::string> Compare(const RoundsOptions& other) const;

 private:
  // A text that is equal for equal options.
  std::string Describe() const {
    std::string vectors;
    for (size_t i = 0; i < dtypes.size(); ++i) {
      absl::StrAppend(&vectors, i == 0 ? "" : ", ", DataTypeString(dtypes[i]),
                      "[", sizes[i], "]");
    }
    return absl::StrCat("num_workers = ", num_workers, ", vectors ", vectors,
                        holds_center ? "" : " in variables",
                        travels ? " that travel as " : "",
                        travels ? kCodeNames[static_cast<int>(*travels)] : "",
                        ", settings '", settings, "'");
  }
};

// The time of a clock that nobody sets.
double NowSecs();

// A wait does not keep the rounds alive. Their deletion ends the wait.
class RoundsResource : public tensorflow::ResourceBase {
 public:
  RoundsResource(tensorflow::ResourceMgr* manager, const std::string& container,
                 const std::string& name, const RoundsOptions& options);
  ~RoundsResource() override;

  // By name, all in the manager's default container that hold a center.
  static std::map<std::string, tensorflow::core::RefCountPtr<RoundsResource>>
  List(tensorflow::ResourceMgr* manager);

  std::string DebugString() const override { return rounds_->subject(); }

  const RoundsOptions& options() const { return options_; }
  TensorRounds* rounds() { return rounds_.get(); }
  Center* center() { return &center_; }

  // A number that no other rounds have, more than 0.
  int64_t id() const { return id_; }

  // How long no op has used them, in seconds.
  double idle_secs() const;
  void Use();

 private:
  tensorflow::ResourceMgr* const manager_;
  const std::string container_;
  const std::string name_;
  const RoundsOptions options_;
  const int64_t id_;
  std::atomic<double> used_;
  const std::shared_ptr<TensorRounds> rounds_;
  Center center_;
};

using RoundsPtr = tensorflow::core::RefCountPtr<RoundsResource>;

inline absl::Status FindRounds(tensorflow::OpKernelContext* ctx,
                               RoundsPtr* rounds) {
  TF_RETURN_IF_ERROR(FindResource(
      ctx, "rounds", "those of Wrapopt>AveragingRounds", rounds));
  (*rounds)->Use();
  return absl::OkStatus();
}

inline absl::Status ToStatus(const RoundsStatus& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.code),
                      status.message);
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
inline void WatchStep(tensorflow::OpKernelContext* ctx, RoundWait* wait) {
  tensorflow::CancellationManager* const manager = ctx->cancellation_manager();
  if (manager == nullptr) return;
  const auto token = manager->get_cancellation_token();
  wait->watch = [manager, token](std::function<void()> ended) {
    return manager->RegisterCallback(token, std::move(ended));
  };
  wait->unwatch = [manager, token] { manager->DeregisterCallback(token); };
}

absl::Status ReadWorker(tensorflow::OpKernelContext* ctx, std::string* worker);
absl::Status ReadPlace(tensorflow::OpKernelContext* ctx, Place* place);
absl::Status ReadKnown(tensorflow::OpKernelContext* ctx, Known* known);

template <class Value>
absl::Status WriteScalar(tensorflow::OpKernelContext* ctx, const char* name,
                         const Value& value) {
  tensorflow::Tensor* output;
  TF_RETURN_IF_ERROR(ctx->allocate_output(name, {}, &output));
  output->scalar<Value>()() = value;
  return absl::OkStatus();
}

// Finds the rounds, and starts a wait for the step of the op.
template <class Read, class Write>
void Wait(tensorflow::OpKernelContext* ctx,
          tensorflow::AsyncOpKernel::DoneCallback done, Read read,
          Write write) {
  RoundsPtr resource;
  RoundWait wait;
  OP_REQUIRES_OK_ASYNC(ctx, FindRounds(ctx, &resource), done);
  OP_REQUIRES_OK_ASYNC(ctx, ReadScalar(ctx, "timeout_secs", &wait.timeout_secs),
                       done);
  OP_REQUIRES_OK_ASYNC(ctx, CheckTimeout(wait.timeout_secs), done);
  OP_REQUIRES_OK_ASYNC(ctx, read(*resource->rounds(), &wait), done);
  WatchStep(ctx, &wait);
  wait.done = [ctx, write, done = std::move(done)](const RoundAnswer& answer) {
    OP_REQUIRES_OK_ASYNC(ctx, ToStatus(answer.status), done);
    OP_REQUIRES_OK_ASYNC(ctx, write(answer.known), done);
    done();
  };
  resource->rounds()->Start(std::move(wait));
}

absl::Status WritePlace(tensorflow::OpKernelContext* ctx, const Place& place);
absl::Status WriteKnown(tensorflow::OpKernelContext* ctx, const char* name,
                        const Known& known);

inline absl::Status Zeros(tensorflow::OpKernelContext* ctx,
                          tensorflow::DataType dtype,
                          const tensorflow::TensorShape& shape,
                          tensorflow::Tensor* zeros) {
  TF_RETURN_IF_ERROR(ctx->allocate_temp(dtype, shape, zeros));
  if (zeros->TotalBytes() > 0) {
    std::memset(zeros->data(), 0, zeros->TotalBytes());
  }
  return absl::OkStatus();
}

// Moves the mean by the values that members have brought. Needs center->mu.
absl::Status AddToMean(tensorflow::OpKernelContext* ctx, Isa isa,
                       RoundsResource* resource);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_ROUNDS_RESOURCE_H_
