// Wrapopt>AveragingRounds, Push, Gather, Mean, Next and Wait: model averaging
// on a parameter server. The rounds themselves are in rounds.h.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/engine/elementwise.h"
#include "cc/engine/isa.h"
#include "cc/engine/number.h"
#include "cc/engine/rounds.h"
#include "cc/kernels/averages.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/parallel.h"
#include "cc/kernels/rounds_resource.h"
#include "cc/kernels/variables.h"
#include "cc/ops/averaging_rounds.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::DataTypeString;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::tstring;

absl::Status FindRounds(OpKernelContext* ctx,
                        std::shared_ptr<TensorRounds>* rounds) {
  RoundsPtr resource;
  TF_RETURN_IF_ERROR(FindRounds(ctx, &resource));
  *rounds = resource->rounds();
  if (resource->served() == nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat((*rounds)->subject(), " must have no settings for this op, ",
                   "got '", resource->settings(), "': they are served"));
}

class AveragingRoundsOp
    : public tensorflow::ResourceOpKernel<RoundsResource> {
 public:
  explicit AveragingRoundsOp(OpKernelConstruction* ctx)
      : ResourceOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_workers", &num_workers_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("settings", &settings_));
  }

 private:
  absl::Status CreateResource(RoundsResource** resource) override
      TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    *resource = new RoundsResource(cinfo_.name(), num_workers_, settings_);
    return absl::OkStatus();
  }

  absl::Status VerifyResource(RoundsResource* resource) override {
    const TensorRounds& rounds = *resource->rounds();
    if (rounds.num_workers() != num_workers_) {
      return absl::InvalidArgumentError(absl::StrCat(
          rounds.subject(), " have num_workers = ", rounds.num_workers(),
          ", got num_workers = ", num_workers_,
          ": use the same num_workers, or another shared_name"));
    }
    if (resource->settings() == settings_) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        rounds.subject(), " have the settings '", resource->settings(),
        "', got '", settings_,
        "': use the same settings, or another shared_name"));
  }

  int64_t num_workers_;
  std::string settings_;
};

class AveragingPushOp : public OpKernel {
 public:
  explicit AveragingPushOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    std::shared_ptr<TensorRounds> rounds;
    OP_REQUIRES_OK(ctx, FindRounds(ctx, &rounds));
    tstring worker;
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, "worker", &worker));
    int64_t round;
    OP_REQUIRES_OK(ctx, ReadRound(ctx, &round));
    tensorflow::OpInputList list;
    OP_REQUIRES_OK(ctx, ctx->input_list("values", &list));
    std::vector<Tensor> values;
    for (const Tensor& value : list) {
      OP_REQUIRES_OK(ctx, Own(ctx, value, &values.emplace_back()));
    }
    Tensor* accepted;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("accepted", {}, &accepted));
    OP_REQUIRES_OK(ctx,
                   ToStatus(rounds->Push(worker, round, std::move(values),
                                         &accepted->scalar<bool>()())));
  }
};

class AveragingGatherOp : public AsyncOpKernel {
 public:
  explicit AveragingGatherOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {}

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    std::shared_ptr<TensorRounds> rounds;
    TensorRounds::Wait wait;
    OP_REQUIRES_OK_ASYNC(ctx, FindRounds(ctx, &rounds), done);
    OP_REQUIRES_OK_ASYNC(ctx, ReadRound(ctx, &wait.round), done);
    OP_REQUIRES_OK_ASYNC(
        ctx, ReadScalar(ctx, "min_workers", &wait.min_workers), done);
    OP_REQUIRES_OK_ASYNC(ctx, ReadTimeout(ctx, &wait.timeout_secs), done);
    OP_REQUIRES_ASYNC(
        ctx,
        wait.min_workers >= 1 && wait.min_workers <= rounds->num_workers(),
        absl::InvalidArgumentError(absl::StrCat(
            "min_workers must be in [1, ", rounds->num_workers(),
            "], the num_workers of ", rounds->subject(), ", got ",
            wait.min_workers)),
        done);
    WatchStep(ctx, &wait);
    wait.done = [ctx, done = std::move(done)](
                    const TensorRounds::Answer& answer) {
      OP_REQUIRES_OK_ASYNC(ctx, ToStatus(answer.status), done);
      Tensor* workers;
      const int64_t m = answer.workers.size();
      OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_output("workers", {m}, &workers),
                           done);
      std::copy(answer.workers.begin(), answer.workers.end(),
                workers->flat<tstring>().data());
      done();
    };
    rounds->Start(std::move(wait));
  }
};

class AveragingWaitOp : public AsyncOpKernel {
 public:
  explicit AveragingWaitOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("worker", &worker_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    std::shared_ptr<TensorRounds> rounds;
    TensorRounds::Wait wait;
    OP_REQUIRES_OK_ASYNC(ctx, FindRounds(ctx, &rounds), done);
    OP_REQUIRES_OK_ASYNC(ctx, ReadRound(ctx, &wait.round), done);
    OP_REQUIRES_OK_ASYNC(ctx, ReadTimeout(ctx, &wait.timeout_secs), done);
    wait.worker = worker_;
    WatchStep(ctx, &wait);
    wait.done = [ctx, done = std::move(done)](
                    const TensorRounds::Answer& answer) {
      OP_REQUIRES_OK_ASYNC(ctx, ToStatus(answer.status), done);
      Tensor* open;
      OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_output("open", {}, &open), done);
      open->scalar<int64_t>()() = answer.open;
      done();
    };
    rounds->Start(std::move(wait));
  }

 private:
  std::string worker_;
};

class AveragingNextOp : public OpKernel {
 public:
  explicit AveragingNextOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("reset", &reset_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::shared_ptr<TensorRounds> rounds;
    OP_REQUIRES_OK(ctx, FindRounds(ctx, &rounds));
    int64_t round;
    OP_REQUIRES_OK(ctx, ReadRound(ctx, &round));
    Tensor* open;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("open", {}, &open));
    OP_REQUIRES_OK(ctx, ToStatus(rounds->Next(round, reset_,
                                              &open->scalar<int64_t>()())));
  }

 private:
  bool reset_;
};

// For resource and ref variables: `Variables` handles the difference.
class AveragingMeanOp : public OpKernel {
 public:
  explicit AveragingMeanOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, FindIsa(&isa_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &n_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("value", &value_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::shared_ptr<TensorRounds> rounds;
    OP_REQUIRES_OK(ctx, FindRounds(ctx, &rounds));
    int64_t round;
    OP_REQUIRES_OK(ctx, ReadRound(ctx, &round));
    std::vector<std::string> workers;
    OP_REQUIRES_OK(ctx, ReadWorkers(ctx, &workers));
    OP_REQUIRES(ctx, !workers.empty(),
                absl::InvalidArgumentError(
                    "workers must name at least one worker, got none"));
    // References, since a concurrent op may drop the values.
    std::vector<Tensor> values;
    OP_REQUIRES_OK(ctx,
                   ToStatus(rounds->Values(round, workers, value_, &values)));

    Variables variables(ctx, &lookup_cache_);
    int centers;
    OP_REQUIRES_OK(
        ctx, variables.Find("centers", Variables::Access::kWrite, &centers));
    OP_REQUIRES_OK(ctx, variables.Lock());
    int64_t elements;
    OP_REQUIRES_OK(ctx,
                   variables.CountElements(centers, n_, dtype_, &elements));
    for (size_t w = 0; w < values.size(); ++w) {
      OP_REQUIRES_OK(ctx, CheckValue(workers[w], values[w], elements));
    }
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite());

    // The mean of the first k values in the scratch array, k = 1, 2, ..., then
    // the assignment. The mean of equal values is exact.
    const Number center = NumberOf(dtype_);
    const Number mean =
        center == Number::kDouble ? Number::kDouble : Number::kFloat;
    Pass pass(mean);
    std::vector<double> rates;
    for (size_t w = 0; w < values.size(); ++w) rates.push_back(1.0 / (w + 1));
    const double assign = 1;
    for (const double& rate : rates) {
      pass.AddStage({FindStep(RuleId::kEma, mean, center, isa_), &rate, 2,
                     SizeOf(center), /*new_inputs=*/true, /*scratch=*/0});
    }
    pass.AddStage({FindStep(RuleId::kEma, center, mean, isa_), &assign, 2,
                   2 * SizeOf(center), /*new_inputs=*/false, /*scratch=*/1});
    size_t offset = 0;  // In bytes, into each value.
    std::vector<void*> operands;
    for (int i = 0; i < n_; ++i) {
      operands.clear();
      for (const Tensor& value : values) {
        operands.push_back(nullptr);
        operands.push_back(static_cast<char*>(value.data()) + offset);
      }
      operands.push_back(variables.data(centers + i));
      operands.push_back(nullptr);
      pass.AddVariable(variables.size(centers + i), operands);
      offset += variables.size(centers + i) * SizeOf(center);
    }
    OP_REQUIRES_OK(ctx, RunPass(ctx, pass));
  }

 private:
  absl::Status CheckValue(const std::string& worker, const Tensor& value,
                          int64_t elements) const {
    const std::string subject =
        absl::StrCat("value ", value_, " of worker '", worker, "'");
    if (value.dtype() != dtype_) {
      return absl::InvalidArgumentError(absl::StrCat(
          subject, " must be of dtype ", DataTypeString(dtype_),
          " (the dtype of the centers), got ", DataTypeString(value.dtype())));
    }
    return CheckShape(
        subject, value.shape(), tensorflow::PartialTensorShape({elements}),
        absl::StrCat("the elements of the ", n_, " centers"));
  }

  Variables::LookupCache lookup_cache_;
  Isa isa_;
  tensorflow::DataType dtype_;
  int n_;
  int64_t value_;
};

#define WRAPOPT_REGISTER(op, Kernel)                                          \
  REGISTER_KERNEL_BUILDER(Name("Wrapopt>" op).Device(tensorflow::DEVICE_CPU), \
                          Kernel)

WRAPOPT_REGISTER("AveragingRounds", AveragingRoundsOp);
WRAPOPT_REGISTER("AveragingPush", AveragingPushOp);
WRAPOPT_REGISTER("AveragingGather", AveragingGatherOp);
WRAPOPT_REGISTER("AveragingMean", AveragingMeanOp);
WRAPOPT_REGISTER("AveragingMeanRef", AveragingMeanOp);
WRAPOPT_REGISTER("AveragingNext", AveragingNextOp);
WRAPOPT_REGISTER("AveragingWait", AveragingWaitOp);

#undef WRAPOPT_REGISTER

}  // namespace
}  // namespace wrapopt
