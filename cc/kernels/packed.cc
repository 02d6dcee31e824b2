// Wrapopt>ReadPacked and AssignPacked: many variables as one tensor, so that
// one transfer copies them to another device.
#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "cc/kernels/gpu.h"
#include "cc/kernels/registration.h"
#include "cc/kernels/threads.h"
#include "cc/kernels/variables.h"
#include "cc/ops/packed.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// Copies whose bytes, not whose number, are divided among threads.
class Copies {
 public:
  void Add(const void* from, void* to, int64_t bytes) {
    if (bytes == 0) return;
    copies_.push_back({static_cast<const char*>(from), static_cast<char*>(to),
                       bytes_});
    bytes_ += bytes;
  }

  void Run(OpKernelContext* ctx) const {
    constexpr int64_t kUnit = 16 << 10, kBytesPerCycle = 8;
    RunParallel(ctx, (bytes_ + kUnit - 1) / kUnit, kUnit / kBytesPerCycle,
                [this](int64_t begin, int64_t end) {
                  RunRange(begin * kUnit, std::min(end * kUnit, bytes_));
                });
  }

 private:
  struct Copy {
    const char* from;
    char* to;
    int64_t offset;  // The bytes of all copies before it.
  };

  void RunRange(int64_t begin, int64_t end) const {
    auto copy = std::upper_bound(
        copies_.begin(), copies_.end(), begin,
        [](int64_t byte, const Copy& copy) { return byte < copy.offset; });
    for (--copy; begin < end; ++copy) {
      const int64_t stop =
          std::next(copy) == copies_.end() ? bytes_ : std::next(copy)->offset;
      const int64_t skip = begin - copy->offset;
      const int64_t bytes = std::min(end, stop) - begin;
      std::memcpy(copy->to + skip, copy->from + skip, bytes);
      begin += bytes;
    }
  }

  std::vector<Copy> copies_;
  int64_t bytes_ = 0;
};

// For resource and ref variables: `Variables` handles the difference.
template <bool kAssign>
class PackedOp : public OpKernel {
 public:
  explicit PackedOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &n_));
  }

  void Compute(OpKernelContext* ctx) override {
    Variables variables(ctx, &lookup_cache_);
    int first;
    OP_REQUIRES_OK(ctx, variables.Find("variables",
                                       kAssign ? Variables::Access::kWrite
                                               : Variables::Access::kRead,
                                       &first));
    OP_REQUIRES_OK(ctx, variables.Lock());
    int64_t elements;
    OP_REQUIRES_OK(ctx, variables.CountElements(first, n_, dtype_, &elements));
    Tensor packed;
    if constexpr (kAssign) {
      packed = ctx->input(n_);
      OP_REQUIRES_OK(ctx, CheckPacked(packed.shape(), n_, elements));
      OP_REQUIRES_OK(ctx, variables.PrepareToWrite());
    } else {
      Tensor* output;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {elements}, &output));
      packed = *output;
    }
    Copies copies;
    int64_t offset = 0;
    for (int i = 0; i < n_; ++i) {
      Tensor* variable = variables.tensor(first + i);
      const int64_t size = variable->NumElements();
      Tensor part = packed.Slice(offset, offset + size);
      offset += size;
      const Tensor& from = kAssign ? part : *variable;
      Tensor& to = kAssign ? *variable : part;
      if (IsOnGpu(ctx)) {
        OP_REQUIRES_OK(ctx, CopyOnGpu(ctx, from, &to));
      } else {
        copies.Add(from.data(), to.data(), from.TotalBytes());
      }
    }
    copies.Run(ctx);
  }

 private:
  Variables::LookupCache lookup_cache_;
  tensorflow::DataType dtype_;
  int n_;
};

const bool packed_registered =
    RegisterKernel<PackedOp<false>>("Wrapopt>ReadPacked", {"variables"}) &&
    RegisterKernel<PackedOp<false>>("Wrapopt>ReadPackedRef", {}) &&
    RegisterKernel<PackedOp<true>>("Wrapopt>AssignPacked", {"variables"}) &&
    RegisterKernel<PackedOp<true>>("Wrapopt>AssignPackedRef", {});

}  // namespace
}  // namespace wrapopt
