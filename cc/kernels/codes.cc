// Wrapopt>Encode and AddDecoded: a worker's values and center in few bits.
#include "cc/kernels/codes.h"

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "cc/engine/codes.h"
#include "cc/engine/isa.h"
#include "cc/kernels/inputs.h"
#include "cc/ops/contracts.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// The base of both kernels.
class CodeOp : public OpKernel {
 public:
  explicit CodeOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string name;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dtype", &name));
    OP_REQUIRES_OK(ctx, FindIsa(&isa_));
    code_ = CodeOf(name);
  }

 protected:
  Code code_;
  Isa isa_;
};

class EncodeOp : public CodeOp {
 public:
  using CodeOp::CodeOp;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &values = ctx->input(0), &center = ctx->input(1),
                 &error = ctx->input(2);
    OP_REQUIRES_OK(
        ctx, CheckShape("values", values.shape(), Vector(-1), "a vector"));
    OP_REQUIRES_OK(ctx, CheckShape("center", center.shape(), values.shape(),
                                   "that of values"));
    OP_REQUIRES_OK(ctx, CheckShape("error", error.shape(), values.shape(),
                                   "that of values"));
    const int64_t n = values.NumElements();
    const int64_t bytes = CodeBytes(code_, n);
    Tensor *code, *new_error;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {bytes}, &code));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, {n}, &new_error));
    Encode(ctx, code_, isa_, values, static_cast<const float*>(center.data()),
           static_cast<const float*>(error.data()), code,
           static_cast<float*>(new_error->data()));
  }
};

class AddDecodedOp : public CodeOp {
 public:
  using CodeOp::CodeOp;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &center = ctx->input(0), &code = ctx->input(1);
    OP_REQUIRES_OK(
        ctx, CheckShape("center", center.shape(), Vector(-1), "a vector"));
    const int64_t n = center.NumElements();
    OP_REQUIRES_OK(ctx, CheckShape("code", code.shape(),
                                   Vector(CodeBytes(code_, n)),
                                   "that of the numbers of center"));
    Tensor* sum;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {n}, &sum));
    Decode(ctx, code_, isa_, center, code, /*rate=*/nullptr, sum);
  }
};

REGISTER_KERNEL_BUILDER(Name("Wrapopt>Encode").Device(tensorflow::DEVICE_CPU),
                        EncodeOp);
REGISTER_KERNEL_BUILDER(
    Name("Wrapopt>AddDecoded").Device(tensorflow::DEVICE_CPU), AddDecodedOp);

}  // namespace
}  // namespace wrapopt
