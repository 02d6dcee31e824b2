#include "absl/status/status.h"
#include "cc/kernels/function_kernel.h"
#include "cc/kernels/registration.h"
#include "cc/kernels/variables.h"
#include "cc/ops/exchange.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernelContext;

// For resource and ref variables: `Variables` handles the difference.
absl::Status ComputeExchange(OpKernelContext* ctx,
                             Variables::LookupCache* cache) {
  Variables variables(ctx, cache);
  int a, b;
  TF_RETURN_IF_ERROR(variables.Find("a", Variables::Access::kWrite, &a));
  TF_RETURN_IF_ERROR(variables.Find("b", Variables::Access::kWrite, &b));
  TF_RETURN_IF_ERROR(variables.Lock());
  const int n = b - a;
  for (int i = 0; i < n; ++i) {
    TF_RETURN_IF_ERROR(CheckExchange(variables, a + i, b + i));
  }
  for (int i = 0; i < n; ++i) {
    TF_RETURN_IF_ERROR(variables.PrepareToExchange(a + i, b + i));
  }
  for (int i = 0; i < n; ++i) variables.Exchange(a + i, b + i);
  return absl::OkStatus();
}

const bool exchange_registered =
    RegisterKernel<FunctionKernel<ComputeExchange>>("Wrapopt>Exchange",
                                                    {"a", "b"}) &&
    RegisterKernel<FunctionKernel<ComputeExchange>>("Wrapopt>ExchangeRef", {});

}  // namespace
}  // namespace wrapopt
