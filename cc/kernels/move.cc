// Wrapopt>Move and Wrapopt>CheckInitialized, with which averages take the place
// of their variables.
#include "absl/status/status.h"
#include "cc/kernels/function_kernel.h"
#include "cc/kernels/registration.h"
#include "cc/kernels/variables.h"
#include "cc/ops/exchange.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernelContext;

// For resource and ref variables: `Variables` handles the difference.
absl::Status ComputeMove(OpKernelContext* ctx, Variables::LookupCache* cache) {
  Variables variables(ctx, cache);
  int from, to;
  TF_RETURN_IF_ERROR(variables.Find("from", Variables::Access::kWrite, &from));
  TF_RETURN_IF_ERROR(variables.FindOrMake("to", Variables::Access::kWrite,
                                          tensorflow::DT_INVALID, &to));
  TF_RETURN_IF_ERROR(variables.Lock());
  const int n = to - from;
  bool replaced = false;
  for (int i = 0; i < n; ++i) {
    TF_RETURN_IF_ERROR(CheckExchange(variables, from + i, to + i));
    TF_RETURN_IF_ERROR(variables.CheckDeclared(to + i, from + i));
    // An empty ref variable has a value, even if it was never assigned.
    replaced |= variables.has_value(to + i) && variables.size(to + i) > 0;
  }
  tensorflow::Tensor* output = nullptr;
  TF_RETURN_IF_ERROR(ctx->allocate_output("replaced", {}, &output));
  for (int i = 0; i < n; ++i) {
    TF_RETURN_IF_ERROR(variables.PrepareToMove(from + i, to + i));
  }
  for (int i = 0; i < n; ++i) variables.Move(from + i, to + i);
  output->scalar<bool>()() = replaced;
  return absl::OkStatus();
}

absl::Status ComputeCheckInitialized(OpKernelContext* ctx,
                                     Variables::LookupCache* cache) {
  Variables variables(ctx, cache);
  int first;
  TF_RETURN_IF_ERROR(
      variables.Find("variables", Variables::Access::kRead, &first));
  TF_RETURN_IF_ERROR(variables.Lock());
  return absl::OkStatus();
}

const bool move_registered =
    RegisterKernel<FunctionKernel<ComputeMove>>("Wrapopt>Move",
                                                {"from", "to", "replaced"}) &&
    RegisterKernel<FunctionKernel<ComputeMove>>("Wrapopt>MoveRef",
                                                {"replaced"}) &&
    RegisterKernel<FunctionKernel<ComputeCheckInitialized>>(
        "Wrapopt>CheckInitialized", {"variables"}) &&
    RegisterKernel<FunctionKernel<ComputeCheckInitialized>>(
        "Wrapopt>CheckInitializedRef", {});

}  // namespace
}  // namespace wrapopt
