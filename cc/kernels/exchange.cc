#include "absl/status/status.h"
#include "cc/kernels/registration.h"
#include "cc/kernels/variables.h"
#include "cc/ops/exchange.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

// For resource and ref variables: `Variables` handles the difference.
class ExchangeOp : public OpKernel {
 public:
  explicit ExchangeOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    Variables variables(ctx, &lookup_cache_);
    int a, b;
    OP_REQUIRES_OK(ctx, variables.Find("a", Variables::Access::kWrite, &a));
    OP_REQUIRES_OK(ctx, variables.Find("b", Variables::Access::kWrite, &b));
    OP_REQUIRES_OK(ctx, variables.Lock());
    const int n = b - a;
    for (int i = 0; i < n; ++i) {
      OP_REQUIRES_OK(ctx, CheckExchange(variables, a + i, b + i));
    }
    for (int i = 0; i < n; ++i) {
      OP_REQUIRES_OK(ctx, variables.PrepareToExchange(a + i, b + i));
    }
    for (int i = 0; i < n; ++i) variables.Exchange(a + i, b + i);
  }

 private:
  Variables::LookupCache lookup_cache_;
};

const bool exchange_registered =
    RegisterKernel<ExchangeOp>("Wrapopt>Exchange", {"a", "b"}) &&
    RegisterKernel<ExchangeOp>("Wrapopt>ExchangeRef", {});

}  // namespace
}  // namespace wrapopt
