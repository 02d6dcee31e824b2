#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/kernels/companions.h"
#include "cc/kernels/function_kernel.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/registration.h"
#include "cc/kernels/variables.h"
#include "cc/old_glibc.h"
#include "cc/ops/staleness_gate.h"
#include "cc/protocols/gate.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/refcount.h"

// The gate calls this function, which glibc 2.34 has moved to another library.
WRAPOPT_OLD_GLIBC(pthread_condattr_setclock, "2.3.3");

namespace wrapopt {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

struct TicketResource : public tensorflow::ResourceBase {
  std::string DebugString() const override { return "staleness ticket"; }

  Ticket ticket;
};

// The gate of a step. There is one for each step, shared by all workers,
// sessions and ops.
absl::Status FindGate(OpKernelContext* ctx, const Variables& variables,
                      int step, std::shared_ptr<Gate>* gate) {
  return FindCompanion(ctx, variables, step, "staleness gate", gate);
}

int64_t ReadStep(const Tensor& t) {
  return t.dtype() == tensorflow::DT_INT32 ? t.scalar<int32_t>()()
                                           : t.scalar<int64_t>()();
}

absl::Status StalenessRecord(OpKernelContext* ctx,
                             Variables::LookupCache* cache) {
  Variables variables(ctx, cache);
  int step;
  TF_RETURN_IF_ERROR(variables.Find("step", Variables::Access::kRead, &step));
  TF_RETURN_IF_ERROR(variables.Lock());
  TF_RETURN_IF_ERROR(CheckStep(variables, step));
  const Tensor& value = *variables.tensor(step);
  Tensor *recorded, *in_flight;
  TF_RETURN_IF_ERROR(ctx->allocate_output("recorded", {}, &recorded));
  TF_RETURN_IF_ERROR(ctx->allocate_output("in_flight", {}, &in_flight));
  std::shared_ptr<Gate> gate;
  TF_RETURN_IF_ERROR(FindGate(ctx, variables, step, &gate));
  recorded->scalar<int64_t>()() =
      gate->Record(ReadStep(value), &in_flight->scalar<int64_t>()());
  return absl::OkStatus();
}

absl::Status StalenessGate(OpKernelContext* ctx,
                           Variables::LookupCache* cache) {
  int64_t recorded, limit, token;
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "recorded", &recorded));
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "limit", &limit));
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "token", &token));
  Variables variables(ctx, cache);
  int step, counter, histogram;
  TF_RETURN_IF_ERROR(variables.Find("step", Variables::Access::kRead, &step));
  TF_RETURN_IF_ERROR(
      variables.Find("stale_counter", Variables::Access::kWrite, &counter));
  TF_RETURN_IF_ERROR(
      variables.Find("histogram", Variables::Access::kWrite, &histogram));
  std::shared_ptr<Gate> gate;
  TF_RETURN_IF_ERROR(FindGate(ctx, variables, step, &gate));
  TicketResource* resource;
  TF_RETURN_IF_ERROR(MakeOwner(ctx, "ticket", &resource));
  Ticket& ticket = resource->ticket;
  const bool begun = ticket.Begin(gate, token);
  TF_RETURN_IF_ERROR(variables.Lock());
  TF_RETURN_IF_ERROR(CheckGate(variables, step, counter, histogram));
  const Tensor& value = *variables.tensor(step);
  TF_RETURN_IF_ERROR(variables.PrepareToWrite());

  Tensor *accept, *staleness, *number;
  TF_RETURN_IF_ERROR(ctx->allocate_output("accept", {}, &accept));
  TF_RETURN_IF_ERROR(ctx->allocate_output("staleness", {}, &staleness));
  TF_RETURN_IF_ERROR(ctx->allocate_output("number", {}, &number));

  // Nothing below can fail.
  int64_t& stale = staleness->scalar<int64_t>()();
  stale = -1;
  const bool admitted =
      begun && ticket.Admit(ReadStep(value), recorded, limit, &stale);
  accept->scalar<bool>()() = admitted;
  number->scalar<int64_t>()() = ticket.number();
  if (!begun) return absl::OkStatus();
  auto counts = variables.tensor(histogram)->matrix<int64_t>();
  const int64_t last = counts.dimension(1) - 1;
  for (const int64_t bucket : gate->TakeAbortedBuckets()) {
    int64_t& count = counts(0, std::min(bucket, last));
    count = SaturatedSum(count, -1);
  }
  const int64_t bucket = std::clamp<int64_t>(stale, 0, last);
  ticket.set_bucket(bucket);
  int64_t& count = counts(admitted ? 0 : 1, bucket);
  count = SaturatedSum(count, 1);
  if (!admitted) variables.tensor(counter)->scalar<float>()() += 1;
  return absl::OkStatus();
}

absl::Status BeginUpdate(OpKernelContext* ctx, Variables::LookupCache* cache) {
  int64_t token;
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "token", &token));
  Variables variables(ctx, cache);
  int step;
  TF_RETURN_IF_ERROR(variables.Find("step", Variables::Access::kRead, &step));
  std::shared_ptr<Gate> gate;
  TF_RETURN_IF_ERROR(FindGate(ctx, variables, step, &gate));
  TicketResource* resource;
  TF_RETURN_IF_ERROR(MakeOwner(ctx, "ticket", &resource));
  Ticket& ticket = resource->ticket;
  const bool begun = ticket.Begin(std::move(gate), token);
  TF_RETURN_IF_ERROR(variables.Lock());
  TF_RETURN_IF_ERROR(CheckStep(variables, step));
  const Tensor& value = *variables.tensor(step);
  Tensor *accept, *number;
  TF_RETURN_IF_ERROR(ctx->allocate_output("accept", {}, &accept));
  TF_RETURN_IF_ERROR(ctx->allocate_output("number", {}, &number));

  // Nothing below can fail.
  if (begun) {
    int64_t staleness;
    ticket.Admit(ReadStep(value), /*recorded=*/0,
                 /*limit=*/std::numeric_limits<int64_t>::max(), &staleness);
  }
  accept->scalar<bool>()() = begun;
  number->scalar<int64_t>()() = ticket.number();
  return absl::OkStatus();
}

class StalenessCompleteOp : public OpKernel {
 public:
  explicit StalenessCompleteOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("increment", &increment_));
  }

  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<TicketResource> resource;
    OP_REQUIRES_OK(
        ctx, FindResource(ctx, "ticket",
                          "one of Wrapopt>StalenessGate or Wrapopt>BeginUpdate",
                          &resource));
    Ticket& ticket = resource->ticket;
    if (ticket.gate() == nullptr) return;

    Variables variables(ctx, &lookup_cache_);
    int step;
    OP_REQUIRES_OK(ctx, variables.Find("step",
                                       increment_ ? Variables::Access::kWrite
                                                  : Variables::Access::kRead,
                                       &step));
    OP_REQUIRES_OK(ctx, variables.Lock());
    OP_REQUIRES_OK(ctx, CheckStep(variables, step));
    std::shared_ptr<Gate> gate;
    OP_REQUIRES_OK(ctx, FindGate(ctx, variables, step, &gate));
    OP_REQUIRES(ctx, gate.get() == ticket.gate(),
                absl::InvalidArgumentError(absl::StrCat(
                    variables.Describe(step),
                    " must be the step of the gate that made the ticket, got ",
                    "another variable")));
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite());
    // The step is locked, so a gate sees both changes or none.
    bool counts;
    OP_REQUIRES(ctx, ticket.Complete(&counts),
                absl::FailedPreconditionError(
                    "ticket must be completed once, got one whose update is "
                    "complete already"));
    if (increment_ && counts) {
      IncrementOf(variables.dtype(step))(variables.tensor(step));
    }
  }

 private:
  Variables::LookupCache lookup_cache_;
  bool increment_;
};

#define WRAPOPT_REGISTER(op, Kernel) \
  WRAPOPT_REGISTER_CPU(op, Kernel);  \
  WRAPOPT_REGISTER_CPU(op "Ref", Kernel)

WRAPOPT_REGISTER("StalenessRecord", FunctionKernel<StalenessRecord>);
WRAPOPT_REGISTER("StalenessGate", FunctionKernel<StalenessGate>);
WRAPOPT_REGISTER("StalenessComplete", StalenessCompleteOp);
WRAPOPT_REGISTER("BeginUpdate", FunctionKernel<BeginUpdate>);

#undef WRAPOPT_REGISTER

}  // namespace
}  // namespace wrapopt
