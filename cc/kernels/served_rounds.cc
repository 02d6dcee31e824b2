// Wrapopt>AveragingEnter, Stage, Arrive, Follow and Close: averaging rounds
// that servers end themselves. The rounds are in engine/served_rounds.h.
#include <cmath>
#include <cstdint>
#include <mutex>  // NOLINT(build/c++11)
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/engine/isa.h"
#include "cc/engine/served_rounds.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/rounds_resource.h"
#include "cc/kernels/served_rounds.h"
#include "cc/ops/averaging_rounds.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::DataTypeString;
using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class AveragingEnterOp : public AsyncOpKernel {
 public:
  explicit AveragingEnterOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {}

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    RoundsPtr resource;
    TensorRounds::Wait wait;
    int64_t process;
    OP_REQUIRES_OK_ASYNC(ctx, Read(ctx, &resource, &wait, &process), done);
    WatchStep(ctx, &wait);
    wait.done = [ctx, done = std::move(done)](
                    const TensorRounds::Answer& answer) {
      OP_REQUIRES_OK_ASYNC(ctx, ToStatus(answer.status), done);
      OP_REQUIRES_OK_ASYNC(ctx, WriteScalar(ctx, "turn", answer.turn), done);
      OP_REQUIRES_OK_ASYNC(ctx, WriteWorkers(ctx, answer.workers), done);
      OP_REQUIRES_OK_ASYNC(ctx, WriteTurns(ctx, answer.turns), done);
      done();
    };
    resource->served()->Enter(std::move(wait), process);
  }

 private:
  static absl::Status Read(OpKernelContext* ctx, RoundsPtr* resource,
                           TensorRounds::Wait* wait, int64_t* process) {
    TF_RETURN_IF_ERROR(FindServed(ctx, resource));
    TF_RETURN_IF_ERROR(ReadWorker(ctx, &wait->worker));
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "process", process));
    Place place;
    TF_RETURN_IF_ERROR(ReadPlace(ctx, &place));
    wait->round = place.round;
    wait->generation = place.generation;
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "most_turns", &wait->most_turns));
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "turn_secs", &wait->turn_secs));
    TF_RETURN_IF_ERROR(ReadTimeout(ctx, &wait->timeout_secs));
    if (wait->most_turns < 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "most_turns must be at least 0, got ", wait->most_turns));
    }
    if (wait->turn_secs > 0) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "turn_secs must be greater than 0, got ", wait->turn_secs));
  }
};

class AveragingStageOp : public OpKernel {
 public:
  explicit AveragingStageOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    RoundsPtr resource;
    OP_REQUIRES_OK(ctx, FindServed(ctx, &resource));
    std::string worker;
    Place place;
    int64_t turn, count, first;
    double weight;
    OP_REQUIRES_OK(ctx, ReadWorker(ctx, &worker));
    OP_REQUIRES_OK(ctx, ReadPlace(ctx, &place));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, "turn", &turn));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, "weight", &weight));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, "count", &count));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, "first", &first));
    OpInputList values;
    OP_REQUIRES_OK(ctx, ctx->input_list("values", &values));
    std::vector<Tensor> parts;
    for (const Tensor& value : values) {
      OP_REQUIRES_OK(ctx, Own(ctx, value, &parts.emplace_back()));
    }
    // Meanwhile nobody restores another center.
    std::lock_guard<std::mutex> lock(resource->center()->mu);
    OP_REQUIRES_OK(ctx, Check(resource.get(), worker, place, weight, count,
                              first, values));
    bool accepted;
    OP_REQUIRES_OK(ctx, ToStatus(resource->served()->Stage(
                            worker, place, turn, weight, count, first,
                            std::move(parts), &accepted)));
    OP_REQUIRES_OK(ctx, WriteScalar(ctx, "accepted", accepted));
  }

 private:
  // The number of values that a worker may send: more than any model has.
  static constexpr int64_t kMost = int64_t{1} << 24;

  // Needs the lock of the center.
  static absl::Status Check(RoundsResource* resource, const std::string& worker,
                            const Place& place, double weight, int64_t count,
                            int64_t first, const OpInputList& values) {
    if (!(weight > 0 && std::isfinite(weight))) {
      return absl::InvalidArgumentError(
          absl::StrCat("weight of worker '", worker,
                       "' must be finite and greater than 0, got ", weight));
    }
    if (!(count >= 1 && count <= kMost && first >= 0 &&
          first <= count - values.size())) {
      return absl::InvalidArgumentError(absl::StrCat(
          "values must be in [0, count), got count ", count, " and ",
          values.size(), " values from ", first));
    }
    // A center that the worker restores may be any.
    const Center* const center = resource->center();
    const ServedTensorRounds::State state = resource->served()->state();
    const bool restores = place.generation > state.place.generation;
    if (!restores && center->values.empty()) {
      return absl::FailedPreconditionError(absl::StrCat(
          resource->rounds()->subject(), " must have a center before worker '",
          worker, "' sends values"));
    }
    if (!restores && count != static_cast<int64_t>(center->values.size())) {
      return absl::InvalidArgumentError(absl::StrCat(
          "count of worker '", worker, "' must be ", center->values.size(),
          ", as the center has, got ", count));
    }
    for (int i = 0; i < values.size(); ++i) {
      const std::string subject =
          absl::StrCat("value ", first + i, " of worker '", worker, "'");
      const bool is_half = values[i].dtype() == tensorflow::DT_HALF ||
                           values[i].dtype() == tensorflow::DT_BFLOAT16;
      if (restores && (is_half || values[i].dims() != 1)) {
        return absl::InvalidArgumentError(absl::StrCat(
            subject, " must be a vector of float or double for a center, got ",
            DataTypeString(values[i].dtype()), " of shape ",
            values[i].shape().DebugString()));
      }
      if (restores) continue;
      const Tensor& like = center->values[first + i];
      if (values[i].dtype() != like.dtype() &&
          !(is_half && like.dtype() == tensorflow::DT_FLOAT)) {
        return absl::InvalidArgumentError(absl::StrCat(
            subject, " must be of dtype ", DataTypeString(like.dtype()),
            ", as the center, got ", DataTypeString(values[i].dtype())));
      }
      TF_RETURN_IF_ERROR(
          CheckShape(subject, values[i].shape(),
                     tensorflow::PartialTensorShape(like.shape().dim_sizes()),
                     "that of the center"));
    }
    return absl::OkStatus();
  }
};

// Arrive and Follow add values to the mean, so that they are freed.
class AveragingArriveOp : public OpKernel {
 public:
  explicit AveragingArriveOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, FindIsa(&isa_));
  }

  void Compute(OpKernelContext* ctx) override {
    RoundsPtr resource;
    OP_REQUIRES_OK(ctx, FindServed(ctx, &resource));
    std::string worker;
    Place place;
    int64_t turn;
    OP_REQUIRES_OK(ctx, ReadWorker(ctx, &worker));
    OP_REQUIRES_OK(ctx, ReadPlace(ctx, &place));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, "turn", &turn));
    bool accepted;
    ServedTensorRounds::State state;
    OP_REQUIRES_OK(ctx, ToStatus(resource->served()->Arrive(
                            worker, place, turn, &accepted, &state)));
    OP_REQUIRES_OK(ctx, WriteScalar(ctx, "accepted", accepted));
    OP_REQUIRES_OK(ctx, WriteWorkers(ctx, state.workers));
    OP_REQUIRES_OK(ctx, WriteTurns(ctx, state.turns));
    std::lock_guard<std::mutex> lock(resource->center()->mu);
    OP_REQUIRES_OK(ctx, AddToMean(ctx, isa_, resource->served(),
                                  resource->center()));
  }

 private:
  Isa isa_;
};

class AveragingFollowOp : public OpKernel {
 public:
  explicit AveragingFollowOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, FindIsa(&isa_));
  }

  void Compute(OpKernelContext* ctx) override {
    RoundsPtr resource;
    OP_REQUIRES_OK(ctx, FindServed(ctx, &resource));
    Place place;
    OP_REQUIRES_OK(ctx, ReadPlace(ctx, &place));
    std::vector<std::string> workers;
    OP_REQUIRES_OK(ctx, ReadWorkers(ctx, &workers));
    Turns turns;
    OP_REQUIRES_OK(ctx, ReadTurns(ctx, &turns));
    const bool accepted = resource->served()->Follow(place, workers, turns);
    OP_REQUIRES_OK(ctx, WriteScalar(ctx, "accepted", accepted));
    std::lock_guard<std::mutex> lock(resource->center()->mu);
    OP_REQUIRES_OK(ctx, AddToMean(ctx, isa_, resource->served(),
                                  resource->center()));
  }

 private:
  Isa isa_;
};

class AveragingCloseOp : public AsyncOpKernel {
 public:
  explicit AveragingCloseOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {}

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    RoundsPtr resource;
    TensorRounds::Wait wait;
    OP_REQUIRES_OK_ASYNC(ctx, Read(ctx, &resource, &wait), done);
    WatchStep(ctx, &wait);
    wait.done = [ctx, done = std::move(done)](
                    const TensorRounds::Answer& answer) {
      OP_REQUIRES_OK_ASYNC(ctx, ToStatus(answer.status), done);
      OP_REQUIRES_OK_ASYNC(ctx, WriteWorkers(ctx, answer.workers), done);
      done();
    };
    resource->rounds()->Start(std::move(wait));
  }

 private:
  static absl::Status Read(OpKernelContext* ctx, RoundsPtr* resource,
                           TensorRounds::Wait* wait) {
    TF_RETURN_IF_ERROR(FindServed(ctx, resource));
    Place place;
    TF_RETURN_IF_ERROR(ReadPlace(ctx, &place));
    wait->round = place.round;
    wait->generation = place.generation;
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "min_workers", &wait->min_workers));
    TF_RETURN_IF_ERROR(ReadTimeout(ctx, &wait->timeout_secs));
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "grace_secs", &wait->grace_secs));
    if (!(wait->grace_secs >= 0)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "grace_secs must be at least 0, got ", wait->grace_secs));
    }
    const TensorRounds& rounds = *(*resource)->rounds();
    if (wait->min_workers >= 1 && wait->min_workers <= rounds.num_workers()) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "min_workers must be in [1, ", rounds.num_workers(),
        "], the num_workers of ", rounds.subject(), ", got ",
        wait->min_workers));
  }
};

#define WRAPOPT_REGISTER(op)                                                \
  REGISTER_KERNEL_BUILDER(                                                  \
      Name("Wrapopt>" #op).Device(tensorflow::DEVICE_CPU), op##Op)

WRAPOPT_REGISTER(AveragingEnter);
WRAPOPT_REGISTER(AveragingStage);
WRAPOPT_REGISTER(AveragingArrive);
WRAPOPT_REGISTER(AveragingFollow);
WRAPOPT_REGISTER(AveragingClose);

#undef WRAPOPT_REGISTER

}  // namespace
}  // namespace wrapopt
