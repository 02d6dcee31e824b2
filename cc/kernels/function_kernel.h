// A kernel that is a function.
#ifndef WRAPOPT_CC_KERNELS_FUNCTION_KERNEL_H_
#define WRAPOPT_CC_KERNELS_FUNCTION_KERNEL_H_

#include <type_traits>

#include "absl/status/status.h"
#include "cc/engine/isa.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/variables.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace wrapopt {

// `compute` takes the context, and one of: nothing more, the instruction set of
// when the kernel was made, the kernel's cache of variables.
template <auto compute>
class FunctionKernel : public tensorflow::OpKernel {
 public:
  explicit FunctionKernel(tensorflow::OpKernelConstruction* ctx)
      : OpKernel(ctx) {
    if constexpr (Takes<Isa>()) OP_REQUIRES_OK(ctx, FindIsa(&isa_));
  }

  void Compute(tensorflow::OpKernelContext* ctx) override {
    if constexpr (Takes<Isa>()) {
      OP_REQUIRES_OK(ctx, compute(ctx, isa_));
    } else if constexpr (Takes<Variables::LookupCache*>()) {
      OP_REQUIRES_OK(ctx, compute(ctx, &lookup_cache_));
    } else {
      OP_REQUIRES_OK(ctx, compute(ctx));
    }
  }

 private:
  template <class Argument>
  static constexpr bool Takes() {
    return std::is_invocable_v<decltype(compute), tensorflow::OpKernelContext*,
                               Argument>;
  }

  Isa isa_;
  Variables::LookupCache lookup_cache_;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_FUNCTION_KERNEL_H_
