// Wrapopt>StalenessRecord, Wrapopt>StalenessGate, Wrapopt>StalenessComplete:
// admit or drop the updates of asynchronous training.
//
// `recorded` is the number of updates that had completed when the worker
// recorded the step. Its weights surely contain these. `admitted` is the number
// of completed updates once all updates in flight are complete. The difference
// is the staleness: the number of updates that the weights may miss.
//
// An update is in flight from its admission until its ticket is completed or
// destroyed. TensorFlow destroys the tensors of a step at its end, also if the
// worker that runs the step is killed. So dead workers need no lease and no
// clock.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/kernels/variables.h"
#include "cc/ops/contracts.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/mutex.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// A sum or a difference that saturates at the ends of int64: a step and its
// record may be any number.
int64_t Sum(int64_t a, int64_t b) {
  int64_t sum;
  if (!__builtin_add_overflow(a, b, &sum)) return sum;
  return a < 0 ? std::numeric_limits<int64_t>::min()
               : std::numeric_limits<int64_t>::max();
}
int64_t Difference(int64_t a, int64_t b) {
  int64_t difference;
  if (!__builtin_sub_overflow(a, b, &difference)) return difference;
  return a < 0 ? std::numeric_limits<int64_t>::min()
               : std::numeric_limits<int64_t>::max();
}

// The state of a step's updates that is not in the step variable. There is one
// for each step, shared by all workers, sessions and ops.
class Updates : public tensorflow::ResourceBase {
 public:
  std::string DebugString() const override { return "staleness gate"; }

  // The record at the value `step` of the step variable. Aborted updates may
  // have changed weights, so they count.
  int64_t Record(int64_t step, int64_t* in_flight) {
    tensorflow::mutex_lock lock(mu_);
    *in_flight = in_flight_;
    return Sum(step, aborted_);
  }

  // Returns whether the update is admitted, and then in flight.
  bool Admit(int64_t step, int64_t recorded, int64_t limit,
             int64_t* staleness) {
    tensorflow::mutex_lock lock(mu_);
    // Some updates in flight may have incremented the step already, and other
    // ops may have set it to any number.
    const int64_t done = Sum(step, aborted_);
    admitted_ = std::clamp(admitted_, done, Sum(done, in_flight_));
    *staleness = Difference(admitted_, recorded);
    if (limit < 0 || *staleness > limit) return false;
    admitted_ = Sum(admitted_, 1);
    ++in_flight_;
    return true;
  }

  void Complete() {
    tensorflow::mutex_lock lock(mu_);
    --in_flight_;
  }

  void Abort() {
    tensorflow::mutex_lock lock(mu_);
    --in_flight_;
    ++aborted_;
  }

 private:
  tensorflow::mutex mu_;
  // The step, once all updates in flight are complete, plus aborted_.
  int64_t admitted_ = 0;
  int64_t in_flight_ = 0;
  int64_t aborted_ = 0;
};

using UpdatesPtr = tensorflow::core::RefCountPtr<Updates>;

absl::Status FindUpdates(OpKernelContext* ctx, const Variables& variables,
                         int step, UpdatesPtr* updates) {
  tensorflow::ResourceMgr* const resources = ctx->resource_manager();
  Updates* found = nullptr;
  TF_RETURN_IF_ERROR(resources->LookupOrCreate<Updates>(
      resources->default_container(),
      absl::StrCat("wrapopt staleness gate ",
                   reinterpret_cast<uintptr_t>(variables.Identity(step))),
      &found, [](Updates** made) {
        *made = new Updates;
        return absl::OkStatus();
      }));
  updates->reset(found);
  return absl::OkStatus();
}

// The right to one update, and whether it was granted.
class Ticket : public tensorflow::ResourceBase {
 public:
  std::string DebugString() const override { return "staleness ticket"; }

  ~Ticket() override {
    if (state_ == State::kInFlight) updates_->Abort();
  }

  void Admit(UpdatesPtr updates) {
    updates_ = std::move(updates);
    state_ = State::kInFlight;
  }

  bool admitted() const { return state_ != State::kRefused; }
  // Null if the update is not admitted.
  const Updates* updates() const { return updates_.get(); }

  // Returns whether this call completed the update; false if an earlier one
  // did.
  bool Complete() {
    tensorflow::mutex_lock lock(mu_);
    if (state_ != State::kInFlight) return false;
    state_ = State::kComplete;
    updates_->Complete();
    return true;
  }

 private:
  enum class State { kRefused, kInFlight, kComplete };

  tensorflow::mutex mu_;
  UpdatesPtr updates_;
  State state_ = State::kRefused;
};

int64_t ReadStep(const Tensor& t) {
  return t.dtype() == tensorflow::DT_INT32 ? t.scalar<int32_t>()()
                                           : t.scalar<int64_t>()();
}

// The step wraps around on overflow, as in TensorFlow.
void IncrementStep(Tensor* t) {
  if (t->dtype() == tensorflow::DT_INT32) {
    int32_t& step = t->scalar<int32_t>()();
    step = static_cast<uint32_t>(step) + 1;
  } else {
    int64_t& step = t->scalar<int64_t>()();
    step = static_cast<uint64_t>(step) + 1;
  }
}

absl::Status ReadScalar(OpKernelContext* ctx, const char* name,
                        int64_t* value) {
  const Tensor* t;
  TF_RETURN_IF_ERROR(ctx->input(name, &t));
  TF_RETURN_IF_ERROR(CheckScalar(name, t->shape()));
  *value = t->scalar<int64_t>()();
  return absl::OkStatus();
}

class StalenessRecordOp : public OpKernel {
 public:
  explicit StalenessRecordOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    Variables variables(ctx, &lookup_cache_);
    int step;
    OP_REQUIRES_OK(ctx,
                   variables.Find("step", Variables::Access::kRead, &step));
    OP_REQUIRES_OK(ctx, variables.Lock());
    OP_REQUIRES_OK(ctx, CheckStep(variables, step));
    const Tensor& value = *variables.tensor(step);
    Tensor *recorded, *in_flight;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("recorded", {}, &recorded));
    OP_REQUIRES_OK(ctx, ctx->allocate_output("in_flight", {}, &in_flight));
    UpdatesPtr updates;
    OP_REQUIRES_OK(ctx, FindUpdates(ctx, variables, step, &updates));
    recorded->scalar<int64_t>()() = updates->Record(
        ReadStep(value), &in_flight->scalar<int64_t>()());
  }

 private:
  Variables::LookupCache lookup_cache_;
};

class StalenessGateOp : public OpKernel {
 public:
  explicit StalenessGateOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    int64_t recorded, limit;
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, "recorded", &recorded));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, "limit", &limit));
    Variables variables(ctx, &lookup_cache_);
    int step, counter, histogram;
    OP_REQUIRES_OK(ctx,
                   variables.Find("step", Variables::Access::kRead, &step));
    OP_REQUIRES_OK(ctx, variables.Find("stale_counter",
                                       Variables::Access::kWrite, &counter));
    OP_REQUIRES_OK(ctx, variables.Find("histogram", Variables::Access::kWrite,
                                       &histogram));
    OP_REQUIRES_OK(ctx, variables.Lock());
    OP_REQUIRES_OK(ctx, CheckGate(variables, step, counter, histogram));
    const Tensor& value = *variables.tensor(step);
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite());

    Tensor *accept, *staleness, *handle;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("accept", {}, &accept));
    OP_REQUIRES_OK(ctx, ctx->allocate_output("staleness", {}, &staleness));
    OP_REQUIRES_OK(ctx, ctx->allocate_output("ticket", {}, &handle));
    UpdatesPtr updates;
    OP_REQUIRES_OK(ctx, FindUpdates(ctx, variables, step, &updates));
    Ticket* const ticket = new Ticket;
    handle->scalar<tensorflow::ResourceHandle>()() =
        tensorflow::ResourceHandle::MakeRefCountingHandle(
            ticket, ctx->device()->name());

    // Nothing below can fail.
    int64_t& stale = staleness->scalar<int64_t>()();
    const bool admitted =
        updates->Admit(ReadStep(value), recorded, limit, &stale);
    accept->scalar<bool>()() = admitted;
    if (admitted) {
      ticket->Admit(std::move(updates));
    } else {
      variables.tensor(counter)->scalar<float>()() += 1;
    }
    const int64_t buckets = variables.shape(histogram).dim_size(1);
    const int64_t bucket = std::clamp<int64_t>(stale, 0, buckets - 1);
    int64_t& count = variables.tensor(histogram)
                         ->matrix<int64_t>()(admitted ? 0 : 1, bucket);
    count = Sum(count, 1);
  }

 private:
  Variables::LookupCache lookup_cache_;
};

class StalenessCompleteOp : public OpKernel {
 public:
  explicit StalenessCompleteOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("increment", &increment_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor* handle;
    OP_REQUIRES_OK(ctx, ctx->input("ticket", &handle));
    OP_REQUIRES_OK(ctx, CheckScalar("ticket", handle->shape()));
    tensorflow::core::RefCountPtr<Ticket> ticket;
    const absl::Status found = LookupResource(
        ctx, handle->scalar<tensorflow::ResourceHandle>()(), &ticket);
    OP_REQUIRES(ctx, found.ok(),
                absl::InvalidArgumentError(
                    absl::StrCat("ticket must be one of Wrapopt>StalenessGate "
                                 "on this device: ", found.message())));
    if (!ticket->admitted()) return;

    Variables variables(ctx, &lookup_cache_);
    int step;
    OP_REQUIRES_OK(
        ctx, variables.Find("step", increment_ ? Variables::Access::kWrite
                                               : Variables::Access::kRead,
                            &step));
    OP_REQUIRES_OK(ctx, variables.Lock());
    OP_REQUIRES_OK(ctx, CheckStep(variables, step));
    UpdatesPtr updates;
    OP_REQUIRES_OK(ctx, FindUpdates(ctx, variables, step, &updates));
    OP_REQUIRES(ctx, updates.get() == ticket->updates(),
                absl::InvalidArgumentError(absl::StrCat(
                    variables.Describe(step),
                    " must be the step of the gate that made the ticket, got ",
                    "another variable")));
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite());
    // The step is locked, so a gate sees both changes or none.
    OP_REQUIRES(ctx, ticket->Complete(),
                absl::FailedPreconditionError(
                    "ticket must be completed once, got one whose update is "
                    "complete already"));
    if (increment_) IncrementStep(variables.tensor(step));
  }

 private:
  Variables::LookupCache lookup_cache_;
  bool increment_;
};

#define WRAPOPT_REGISTER(op, Kernel)                                       \
  REGISTER_KERNEL_BUILDER(Name("Wrapopt>" op).Device(tensorflow::DEVICE_CPU), \
                          Kernel);                                         \
  REGISTER_KERNEL_BUILDER(                                                 \
      Name("Wrapopt>" op "Ref").Device(tensorflow::DEVICE_CPU), Kernel)

WRAPOPT_REGISTER("StalenessRecord", StalenessRecordOp);
WRAPOPT_REGISTER("StalenessGate", StalenessGateOp);
WRAPOPT_REGISTER("StalenessComplete", StalenessCompleteOp);

#undef WRAPOPT_REGISTER

}  // namespace
}  // namespace wrapopt
