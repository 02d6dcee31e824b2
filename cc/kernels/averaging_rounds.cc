#include <algorithm>
#include <cmath>
#include <cstdint>
#include <mutex>  // NOLINT(build/c++11)
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cc/engine/isa.h"
#include "cc/kernels/codes.h"
#include "cc/kernels/function_kernel.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/registration.h"
#include "cc/kernels/rounds_resource.h"
#include "cc/ops/averaging_rounds.h"
#include "cc/ops/contracts.h"
#include "cc/protocols/rounds.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/tstring.h"

namespace wrapopt {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::DataTypeString;
using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::tstring;

class AveragingRoundsOp : public tensorflow::ResourceOpKernel<RoundsResource> {
 public:
  explicit AveragingRoundsOp(OpKernelConstruction* ctx)
      : ResourceOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_workers", &options_.num_workers));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dtypes", &options_.dtypes));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("sizes", &options_.sizes));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("holds_center", &options_.holds_center));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("settings", &options_.settings));
    std::string travels;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("travels", &travels));
    OP_REQUIRES_OK(ctx, CheckVectors(options_.dtypes, options_.sizes));
    OP_REQUIRES_OK(ctx, CheckTravels(travels, options_.dtypes,
                                     options_.holds_center));
    if (!travels.empty()) options_.travels = CodeOf(travels);
    OP_REQUIRES_OK(ctx, ctx->GetAttr("container", &container_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shared_name", &shared_name_));
  }

  void Compute(OpKernelContext* ctx) override {
    if (!shared_name_.empty() && get_resource() == nullptr) {
      DropUnused(ctx->resource_manager());
    }
    ResourceOpKernel::Compute(ctx);
  }

 private:
  // Drops rounds of other options that a worker has made that was refused. One
  // that waits for another server calls all the time.
  void DropUnused(tensorflow::ResourceMgr* manager) const {
    const std::string& container =
        container_.empty() ? manager->default_container() : container_;
    RoundsResource* found;
    if (!manager->Lookup(container, shared_name_, &found).ok()) return;
    const RoundsPtr owned(found);
    const auto [has, got] = found->options().Compare(options_);
    if (has == got || found->idle_secs() < 1 || !found->rounds()->is_unused()) {
      return;
    }
    // Another op may have dropped them.
    manager->Delete<RoundsResource>(container, shared_name_).IgnoreError();
  }

  absl::Status CreateResource(RoundsResource** resource) override
      TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    *resource = new RoundsResource(cinfo_.resource_manager(),
                                   cinfo_.container(), cinfo_.name(), options_);
    return absl::OkStatus();
  }

  absl::Status VerifyResource(RoundsResource* resource) override {
    const auto [has, got] = resource->options().Compare(options_);
    if (has == got) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        resource->rounds()->subject(), " have ", has, ", got ", got, ": all ",
        "workers of a job must give the same, and other jobs another name"));
  }

  RoundsOptions options_;
  std::string container_;
  std::string shared_name_;
};

absl::Status AveragingJoin(OpKernelContext* ctx) {
  RoundsPtr resource;
  std::string worker;
  int64_t process = 0, workers = 0;
  bool resumes = false;
  TF_RETURN_IF_ERROR(FindRounds(ctx, &resource));
  TF_RETURN_IF_ERROR(ReadWorker(ctx, &worker));
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "process", &process));
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "resumes", &resumes));
  TF_RETURN_IF_ERROR(
      ToStatus(resource->rounds()->Join(worker, process, resumes, &workers)));
  TF_RETURN_IF_ERROR(WriteScalar(ctx, "workers", workers));
  return absl::OkStatus();
}

absl::Status ReadStopped(OpKernelConstruction* ctx, float* secs) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("stopped_secs", secs));
  if (*secs >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("stopped_secs must be at least 0, got ", *secs));
}

class AveragingEnterOp : public AsyncOpKernel {
 public:
  explicit AveragingEnterOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadStopped(ctx, &stopped_secs_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const auto read = [this, ctx](const TensorRounds&, RoundWait* wait) {
      wait->stopped_secs = stopped_secs_;
      return Read(ctx, wait);
    };
    Wait(ctx, std::move(done), read, [ctx](const Known& known) -> absl::Status {
      TF_RETURN_IF_ERROR(WriteScalar(ctx, "turn", known.turn));
      return WriteKnown(ctx, "known", known);
    });
  }

 private:
  static absl::Status Read(OpKernelContext* ctx, RoundWait* wait) {
    TF_RETURN_IF_ERROR(ReadPlace(ctx, &wait->place));
    TF_RETURN_IF_ERROR(ReadWorker(ctx, &wait->worker));
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "process", &wait->process));
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "most_turns", &wait->most_turns));
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "turn_secs", &wait->turn_secs));
    if (wait->most_turns < 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "most_turns must be at least 0, got ", wait->most_turns));
    }
    wait->what = wait->most_turns == 0 ? RoundWait::For::kRestore
                                       : RoundWait::For::kTurn;
    if (wait->turn_secs > 0) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "turn_secs must be greater than 0, got ", wait->turn_secs));
  }

  float stopped_secs_;
};

// A message of a worker: its values, or a center.
struct Sent {
  std::string worker;
  Known known;
  double weight;
  int64_t count, first;
  std::vector<Tensor> values;
  bool restores = false;  // They are a center for a later generation.
};

// Checks the dtype of a value of vector i, and tells its size.
absl::Status CheckDtype(const std::string& subject, const Tensor& value,
                        bool restores, const RoundsOptions& options, int64_t i,
                        int64_t* size) {
  const tensorflow::DataType dtype = options.dtypes[i];
  *size = options.sizes[i];
  if (options.travels && !restores) {
    *size = CodeBytes(*options.travels, *size);
    if (value.dtype() == tensorflow::DT_UINT8) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        subject, " must be of dtype uint8, as codes, got ",
        DataTypeString(value.dtype())));
  }
  const bool is_half = value.dtype() == tensorflow::DT_HALF ||
                       value.dtype() == tensorflow::DT_BFLOAT16;
  if (value.dtype() == dtype ||
      (is_half && dtype == tensorflow::DT_FLOAT && !restores)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(subject, " must be of dtype ", DataTypeString(dtype),
                   ", as the center, got ", DataTypeString(value.dtype())));
}

// Checks values, each of one vector or of several consecutive ones, and makes
// each vector a value of its own.
absl::Status SplitStaged(const RoundsOptions& options, Sent* sent) {
  std::vector<Tensor> parts;
  int64_t next = sent->first;
  for (const Tensor& value : sent->values) {
    const std::string subject = absl::StrCat("value ", next, " of worker ",
                                             InQuotes(sent->worker));
    const bool is_vector = value.dims() == 1;
    int64_t begin = 0;
    do {
      int64_t size = 0;
      if (next < sent->count) {
        TF_RETURN_IF_ERROR(CheckDtype(subject, value, sent->restores, options,
                                      next % options.num_vectors(), &size));
      }
      if (!is_vector || next == sent->count ||
          size > value.NumElements() - begin) {
        return Misshapen(subject, value.shape(),
                         Vector(begin + size).DebugString(),
                         "that of the center");
      }
      parts.push_back(size == value.NumElements()
                          ? value
                          : value.Slice(begin, begin + size));
      begin += size;
      ++next;
    } while (begin < value.NumElements());
  }
  sent->values = std::move(parts);
  return absl::OkStatus();
}

// Needs the lock of the center.
absl::Status CheckStaged(RoundsResource* resource, Sent* sent) {
  const std::string worker = InQuotes(sent->worker);
  if (!(sent->weight >= 0 && std::isfinite(sent->weight))) {
    return absl::InvalidArgumentError(
        absl::StrCat("weight of worker ", worker,
                     " must be finite and at least 0, got ", sent->weight));
  }
  TensorRounds* const rounds = resource->rounds();
  const RoundsOptions& options = resource->options();
  const int64_t n = options.num_vectors(), count = sent->count;
  sent->restores =
      sent->known.place.generation > rounds->known().place.generation;
  if (options.holds_center && !sent->restores &&
      resource->center()->values.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat(rounds->subject(), " must have a center before worker ",
                     worker, " sends values"));
  }
  if (!options.holds_center && sent->restores) {
    return absl::FailedPreconditionError(absl::StrCat(
        rounds->subject(), " must hold the center to restore it, but it is ",
        "in variables"));
  }
  const int64_t least = sent->restores || sent->weight > 0 ? n : 0;
  const int64_t errors = options.travels ? n : 0;
  if (count != least && !(sent->restores && count >= n + errors &&
                          count <= n + errors + n)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "count of worker ", worker, " must be ", least,
        least == n ? ", the number of vectors of the center"
                   : ", since its weight is 0",
        !sent->restores   ? ""
        : options.travels ? ", or more for errors and velocities"
                          : ", or more for velocities",
        ", got ", count));
  }
  const int64_t size = sent->values.size();
  if (sent->first < 0 || sent->first > count - size) {
    return absl::InvalidArgumentError(
        absl::StrCat("values must be in [0, count), got count ", count, " and ",
                     size, " values from ", sent->first));
  }
  return SplitStaged(options, sent);
}

absl::Status AveragingStage(OpKernelContext* ctx, Isa isa) {
  RoundsPtr resource;
  TF_RETURN_IF_ERROR(FindRounds(ctx, &resource));
  Sent sent;
  TF_RETURN_IF_ERROR(ReadWorker(ctx, &sent.worker));
  TF_RETURN_IF_ERROR(ReadKnown(ctx, &sent.known));
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "weight", &sent.weight));
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "count", &sent.count));
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "first", &sent.first));
  OpInputList values;
  TF_RETURN_IF_ERROR(ctx->input_list("values", &values));
  for (const Tensor& value : values) {
    TF_RETURN_IF_ERROR(Own(ctx, value, &sent.values.emplace_back()));
  }
  // Meanwhile nobody restores another center.
  std::lock_guard<std::mutex> lock(resource->center()->mu);
  TF_RETURN_IF_ERROR(CheckStaged(resource.get(), &sent));
  TF_RETURN_IF_ERROR(WriteScalar(
      ctx, "accepted",
      resource->rounds()->Stage(sent.worker, sent.known, sent.weight,
                                sent.count, sent.first,
                                std::move(sent.values))));
  TF_RETURN_IF_ERROR(AddToMean(ctx, isa, resource.get()));
  return absl::OkStatus();
}

// Arrive and Follow add values to the mean, so that they are freed.
absl::Status AveragingArrive(OpKernelContext* ctx, Isa isa) {
  RoundsPtr resource;
  std::string worker;
  Known told, known;
  TF_RETURN_IF_ERROR(FindRounds(ctx, &resource));
  TF_RETURN_IF_ERROR(ReadWorker(ctx, &worker));
  TF_RETURN_IF_ERROR(ReadKnown(ctx, &told));
  TF_RETURN_IF_ERROR(WriteScalar(
      ctx, "accepted", resource->rounds()->Arrive(worker, told, &known)));
  TF_RETURN_IF_ERROR(WriteKnown(ctx, "known_now", known));
  std::lock_guard<std::mutex> lock(resource->center()->mu);
  TF_RETURN_IF_ERROR(AddToMean(ctx, isa, resource.get()));
  return absl::OkStatus();
}

absl::Status AveragingRelease(OpKernelContext* ctx) {
  RoundsPtr resource;
  std::string worker;
  int64_t turn;
  TF_RETURN_IF_ERROR(FindRounds(ctx, &resource));
  TF_RETURN_IF_ERROR(ReadWorker(ctx, &worker));
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "turn", &turn));
  TF_RETURN_IF_ERROR(
      WriteScalar(ctx, "was_alive", resource->rounds()->Release(worker, turn)));
  return absl::OkStatus();
}

absl::Status AveragingFollow(OpKernelContext* ctx, Isa isa) {
  RoundsPtr resource;
  Known known;
  TF_RETURN_IF_ERROR(FindRounds(ctx, &resource));
  TF_RETURN_IF_ERROR(ReadKnown(ctx, &known));
  TF_RETURN_IF_ERROR(
      WriteScalar(ctx, "accepted", resource->rounds()->Follow(known)));
  std::lock_guard<std::mutex> lock(resource->center()->mu);
  TF_RETURN_IF_ERROR(AddToMean(ctx, isa, resource.get()));
  return absl::OkStatus();
}

class AveragingCloseOp : public AsyncOpKernel {
 public:
  explicit AveragingCloseOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadStopped(ctx, &stopped_secs_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const auto read = [this, ctx](const TensorRounds& rounds, RoundWait* wait) {
      wait->stopped_secs = stopped_secs_;
      return Read(ctx, rounds, wait);
    };
    Wait(ctx, std::move(done), read,
         [ctx](const Known& known) { return WriteKnown(ctx, "known", known); });
  }

 private:
  static absl::Status Read(OpKernelContext* ctx, const TensorRounds& rounds,
                           RoundWait* wait) {
    TF_RETURN_IF_ERROR(ReadPlace(ctx, &wait->place));
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "min_workers", &wait->min_workers));
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "grace_secs", &wait->grace_secs));
    if (!(wait->grace_secs >= 0)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "grace_secs must be at least 0, got ", wait->grace_secs));
    }
    if (wait->min_workers >= 1 && wait->min_workers <= rounds.num_workers()) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        absl::StrCat("min_workers must be in [1, ", rounds.num_workers(),
                     "], the num_workers of ", rounds.subject(), ", got ",
                     wait->min_workers));
  }

  float stopped_secs_;
};

absl::Status AveragingLeave(OpKernelContext* ctx) {
  RoundsPtr resource;
  std::string worker;
  int64_t process;
  TF_RETURN_IF_ERROR(FindRounds(ctx, &resource));
  TF_RETURN_IF_ERROR(ReadWorker(ctx, &worker));
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "process", &process));
  TF_RETURN_IF_ERROR(
      WriteScalar(ctx, "has_left", resource->rounds()->Leave(worker, process)));
  return absl::OkStatus();
}

class AveragingStateOp : public OpKernel {
 public:
  explicit AveragingStateOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("worker", &worker_));
  }

  void Compute(OpKernelContext* ctx) override {
    RoundsPtr resource;
    OP_REQUIRES_OK(ctx, FindRounds(ctx, &resource));
    Center* const center = resource->center();
    std::lock_guard<std::mutex> lock(center->mu);
    if (!worker_.empty()) resource->rounds()->Expect(worker_);
    const Known known = resource->rounds()->known();
    OP_REQUIRES_OK(ctx, WritePlace(ctx, known.place));
    OP_REQUIRES_OK(ctx, WriteKnown(ctx, "known", known));
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("numbers", {5}, &output));
    auto numbers = output->vec<int64_t>();
    numbers(0) = center->values.size();
    numbers(1) = center->velocities.size();
    numbers(2) = resource->rounds()->staged();
    numbers(3) = resource->id();
    numbers(4) = center->job;
    const std::set<std::string> left = resource->rounds()->left();
    const int64_t l = left.size();
    OP_REQUIRES_OK(ctx, ctx->allocate_output("left", {l}, &output));
    std::copy(left.begin(), left.end(), output->vec<tstring>().data());
  }

 private:
  std::string worker_;
};

absl::Status AveragingList(OpKernelContext* ctx) {
  const auto listed = RoundsResource::List(ctx->resource_manager());
  const int64_t r = listed.size();
  Tensor *names, *settings, *numbers;
  TF_RETURN_IF_ERROR(ctx->allocate_output("names", {r}, &names));
  TF_RETURN_IF_ERROR(ctx->allocate_output("settings", {r}, &settings));
  TF_RETURN_IF_ERROR(ctx->allocate_output("numbers", {r, 5}, &numbers));
  int64_t i = 0;
  for (const auto& [name, resource] : listed) {
    names->vec<tstring>()(i) = name;
    settings->vec<tstring>()(i) = resource->options().settings;
    auto of_this = numbers->matrix<int64_t>();
    Center* const center = resource->center();
    std::lock_guard<std::mutex> lock(center->mu);
    const Place place = resource->rounds()->known().place;
    int64_t bytes = 0;
    for (const auto* const tensors :
         {&center->values, &center->velocities, &center->errors}) {
      for (const Tensor& tensor : *tensors) bytes += tensor.TotalBytes();
    }
    of_this(i, 0) = place.round;
    of_this(i, 1) = place.generation;
    of_this(i, 2) = center->job;
    of_this(i, 3) = static_cast<int64_t>(resource->idle_secs());
    of_this(i, 4) = bytes;
    ++i;
  }
  return absl::OkStatus();
}

absl::Status AveragingDrop(OpKernelContext* ctx) {
  tstring name;
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "shared_name", &name));
  tensorflow::ResourceMgr* const manager = ctx->resource_manager();
  const bool is_listed = RoundsResource::List(manager).count(name) > 0;
  TF_RETURN_IF_ERROR(WriteScalar(
      ctx, "dropped",
      is_listed && manager
                       ->Delete<RoundsResource>(manager->default_container(),
                                                std::string(name))
                       .ok()));
  return absl::OkStatus();
}

absl::Status AveragingClock(OpKernelContext* ctx) {
  TF_RETURN_IF_ERROR(WriteScalar(ctx, "secs", NowSecs()));
  return absl::OkStatus();
}

absl::Status AveragingRaise(OpKernelContext* ctx) {
  int32_t code;
  tensorflow::tstring message;
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "code", &code));
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "message", &message));
  if (code < 0 || code > 16) {
    return absl::InvalidArgumentError(
        absl::StrCat("code must be in [0, 16], got ", code));
  }
  TF_RETURN_IF_ERROR(absl::Status(static_cast<absl::StatusCode>(code),
                                  absl::string_view(message)));
  return absl::OkStatus();
}

WRAPOPT_REGISTER_CPU("AveragingRounds", AveragingRoundsOp);
WRAPOPT_REGISTER_CPU("AveragingEnter", AveragingEnterOp);
WRAPOPT_REGISTER_CPU("AveragingClose", AveragingCloseOp);
WRAPOPT_REGISTER_CPU("AveragingState", AveragingStateOp);
WRAPOPT_REGISTER_CPU("AveragingJoin", FunctionKernel<AveragingJoin>);
WRAPOPT_REGISTER_CPU("AveragingStage", FunctionKernel<AveragingStage>);
WRAPOPT_REGISTER_CPU("AveragingArrive", FunctionKernel<AveragingArrive>);
WRAPOPT_REGISTER_CPU("AveragingRelease", FunctionKernel<AveragingRelease>);
WRAPOPT_REGISTER_CPU("AveragingFollow", FunctionKernel<AveragingFollow>);
WRAPOPT_REGISTER_CPU("AveragingLeave", FunctionKernel<AveragingLeave>);
WRAPOPT_REGISTER_CPU("AveragingList", FunctionKernel<AveragingList>);
WRAPOPT_REGISTER_CPU("AveragingDrop", FunctionKernel<AveragingDrop>);
WRAPOPT_REGISTER_CPU("AveragingClock", FunctionKernel<AveragingClock>);
WRAPOPT_REGISTER_CPU("AveragingRaise", FunctionKernel<AveragingRaise>);

}  // namespace
}  // namespace wrapopt
