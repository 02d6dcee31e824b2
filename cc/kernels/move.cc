// Wrapopt>Move and Wrapopt>CheckInitialized, with which averages take the place
// of their variables.
#include "absl/status/status.h"
#include "cc/kernels/registration.h"
#include "cc/kernels/variables.h"
#include "cc/ops/exchange.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

// For resource and ref variables: `Variables` handles the difference.
class MoveOp : public OpKernel {
 public:
  explicit MoveOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    Variables variables(ctx, &lookup_cache_);
    int from, to;
    OP_REQUIRES_OK(ctx,
                   variables.Find("from", Variables::Access::kWrite, &from));
    OP_REQUIRES_OK(ctx,
                   variables.FindOrMake("to", Variables::Access::kWrite,
                                        tensorflow::DT_INVALID, &to));
    OP_REQUIRES_OK(ctx, variables.Lock());
    const int n = to - from;
    bool replaced = false;
    for (int i = 0; i < n; ++i) {
      OP_REQUIRES_OK(ctx, CheckExchange(variables, from + i, to + i));
      OP_REQUIRES_OK(ctx, variables.CheckDeclared(to + i, from + i));
      // An empty ref variable has a value, even if it was never assigned.
      replaced |= variables.has_value(to + i) && variables.size(to + i) > 0;
    }
    tensorflow::Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("replaced", {}, &output));
    for (int i = 0; i < n; ++i) {
      OP_REQUIRES_OK(ctx, variables.PrepareToMove(from + i, to + i));
    }
    for (int i = 0; i < n; ++i) variables.Move(from + i, to + i);
    output->scalar<bool>()() = replaced;
  }

 private:
  Variables::LookupCache lookup_cache_;
};

class CheckInitializedOp : public OpKernel {
 public:
  explicit CheckInitializedOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    Variables variables(ctx, &lookup_cache_);
    int first;
    OP_REQUIRES_OK(
        ctx, variables.Find("variables", Variables::Access::kRead, &first));
    OP_REQUIRES_OK(ctx, variables.Lock());
  }

 private:
  Variables::LookupCache lookup_cache_;
};

const bool move_registered =
    RegisterKernel<MoveOp>("Wrapopt>Move", {"from", "to", "replaced"}) &&
    RegisterKernel<MoveOp>("Wrapopt>MoveRef", {"replaced"}) &&
    RegisterKernel<CheckInitializedOp>("Wrapopt>CheckInitialized",
                                       {"variables"}) &&
    RegisterKernel<CheckInitializedOp>("Wrapopt>CheckInitializedRef", {});

}  // namespace
}  // namespace wrapopt
