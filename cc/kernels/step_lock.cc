// Wrapopt>LockSteps, Wrapopt>UnlockSteps: one step at a time.
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/kernels/companions.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/registration.h"
#include "cc/kernels/variables.h"
#include "cc/protocols/step_lock.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/platform/refcount.h"

namespace wrapopt {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::CancellationManager;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

// The lock of a step, which waits for it or holds it. The step holds it until
// this is destroyed, at the latest.
struct HeldResource : public tensorflow::ResourceBase {
  ~HeldResource() override { Release(); }

  std::string DebugString() const override { return "step lock"; }

  // Returns whether it was held.
  bool Release() {
    if (!is_held.exchange(false)) return false;
    lock->Release();
    return true;
  }

  std::shared_ptr<StepLock> lock;
  std::atomic<bool> is_held{false};
};

class LockStepsOp : public AsyncOpKernel {
 public:
  explicit LockStepsOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("of", &of_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    HeldResource* held = nullptr;
    OP_REQUIRES_OK_ASYNC(ctx, Make(ctx, &held), done);
    const std::shared_ptr<StepLock> lock = held->lock;
    CancellationManager* const manager = ctx->cancellation_manager();
    const auto token = manager == nullptr
                           ? CancellationManager::kInvalidToken
                           : manager->get_cancellation_token();
    // Runs in the step's own threads, not in one that cancels the step or
    // releases the lock.
    const auto end = [ctx, done](const absl::Status& status,
                                 std::function<void()> first) {
      (*ctx->runner())([ctx, done, status, first = std::move(first)] {
        if (first) first();
        ctx->SetStatus(status);
        done();
      });
    };
    const absl::Status cancelled =
        absl::CancelledError("The step ended while it waited for its turn.");
    const bool may_wait = lock->Acquire(
        held,
        [=] {
          return manager == nullptr ||
                 manager->RegisterCallback(token, [=] {
                   if (lock->GiveUp(held)) end(cancelled, nullptr);
                 });
        },
        [=] {
          held->is_held = true;
          end(absl::OkStatus(), [manager, token] {
            if (manager != nullptr) manager->DeregisterCallback(token);
          });
        });
    if (!may_wait) end(cancelled, nullptr);
  }

 private:
  absl::Status Make(OpKernelContext* ctx, HeldResource** held) {
    Variables variables(ctx, &lookup_cache_);
    int variable;
    TF_RETURN_IF_ERROR(
        variables.Find("variable", Variables::Access::kRead, &variable));
    std::shared_ptr<StepLock> lock;
    TF_RETURN_IF_ERROR(FindCompanion(ctx, variables, variable,
                                      absl::StrCat("step lock ", of_), &lock));
    TF_RETURN_IF_ERROR(MakeOwner(ctx, "lock", held));
    (*held)->lock = std::move(lock);
    return absl::OkStatus();
  }

  std::string of_;
  Variables::LookupCache lookup_cache_;
};

class UnlockStepsOp : public OpKernel {
 public:
  explicit UnlockStepsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<HeldResource> held;
    OP_REQUIRES_OK(ctx,
                   FindResource(ctx, "lock", "of Wrapopt>LockSteps", &held));
    OP_REQUIRES(ctx, held->Release(),
                absl::FailedPreconditionError(
                    "lock must be unlocked once, got one that is unlocked"));
  }

  bool IsExpensive() override { return false; }
};

WRAPOPT_REGISTER_CPU("LockSteps", LockStepsOp);
WRAPOPT_REGISTER_CPU("UnlockSteps", UnlockStepsOp);

}  // namespace
}  // namespace wrapopt
