// Wrapopt>AveragingMean: the end of an averaging round whose center is in
// variables.
#include <cstdint>
#include <mutex>  // NOLINT(build/c++11)
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/engine/elementwise.h"
#include "cc/engine/isa.h"
#include "cc/engine/number.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/registration.h"
#include "cc/kernels/rounds_resource.h"
#include "cc/kernels/threads.h"
#include "cc/kernels/variables.h"
#include "cc/ops/averaging_rounds.h"
#include "cc/protocols/rounds.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::DataTypeString;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class AveragingMeanOp : public OpKernel {
 public:
  explicit AveragingMeanOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, FindIsa(&isa_));
    std::vector<int64_t> sizes;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("sizes", &sizes));
    const int variables = num_inputs() - 2;
    OP_REQUIRES_OK(ctx, CheckGroups(sizes, variables));
    int next = 0;
    for (const int64_t size : sizes) {
      if (size == 0) {
        counters_.push_back(next++);
        continue;
      }
      vectors_.push_back({next, next + static_cast<int>(size)});
      next = vectors_.back().end;
    }
    for (; next < variables; ++next) counters_.push_back(next);
  }

  void Compute(OpKernelContext* ctx) override {
    RoundsPtr resource;
    Known known;
    OP_REQUIRES_OK(ctx, FindRounds(ctx, &resource));
    OP_REQUIRES_OK(ctx, ReadKnown(ctx, &known));
    TensorRounds* const rounds = resource->rounds();
    TensorRounds::Deferred after(rounds);
    std::lock_guard<std::mutex> lock(resource->center()->mu);
    bool is_open;
    OP_REQUIRES_OK(ctx, ToStatus(rounds->CheckClosed(known, &is_open)));
    if (is_open) {
      OP_REQUIRES_OK(ctx, AddToMean(ctx, isa_, resource.get()));
      OP_REQUIRES_OK(ctx, Assign(ctx, resource.get()));
      resource->center()->ForgetMean();
      OP_REQUIRES_OK(ctx, ToStatus(rounds->Next(&after)));
    }
    OP_REQUIRES_OK(ctx, WritePlace(ctx, rounds->known().place));
  }

 private:
  absl::Status Assign(OpKernelContext* ctx, RoundsResource* resource) {
    const RoundsOptions& options = resource->options();
    const std::vector<Tensor>& mean = resource->center()->mean;
    const size_t n = vectors_.size();
    if (options.holds_center || options.dtypes.size() != n ||
        mean.size() != n) {
      return absl::FailedPreconditionError(absl::StrCat(
          resource->rounds()->subject(), " must have ", n, " means, and their ",
          "center in variables, got ", mean.size(), " means",
          options.holds_center ? " and a center" : ""));
    }
    Variables variables(ctx, &lookup_cache_);
    int first;
    TF_RETURN_IF_ERROR(
        variables.Find("resources", Variables::Access::kWrite, &first));
    TF_RETURN_IF_ERROR(
        variables.Find("refs", Variables::Access::kWrite, &first));
    TF_RETURN_IF_ERROR(variables.Lock());
    TF_RETURN_IF_ERROR(Check(variables, options));
    TF_RETURN_IF_ERROR(variables.PrepareToWrite());

    for (size_t i = 0; i < n; ++i) {
      const Number to = NumberOf(variables.dtype(vectors_[i].begin));
      const Number from = NumberOf(options.dtypes[i]);
      const double assign = 1;
      Pass pass;
      pass.AddStage({FindStep(RuleId::kEma, to, from, isa_), &assign, 2,
                     SizeOf(from) + SizeOf(to), /*new_inputs=*/true});
      char* data = static_cast<char*>(mean[i].data());
      for (int v = vectors_[i].begin; v < vectors_[i].end; ++v) {
        pass.AddVariable(variables.size(v), {variables.data(v), data});
        data += variables.size(v) * SizeOf(from);
      }
      TF_RETURN_IF_ERROR(RunPass(ctx, pass));
    }
    for (const int v : counters_) {
      IncrementOf(variables.dtype(v))(variables.tensor(v));
    }
    return absl::OkStatus();
  }

  absl::Status Check(const Variables& variables,
                     const RoundsOptions& options) const {
    for (size_t i = 0; i < vectors_.size(); ++i) {
      const auto [begin, end] = vectors_[i];
      const tensorflow::DataType dtype = variables.dtype(begin);
      const bool is_half =
          dtype == tensorflow::DT_HALF || dtype == tensorflow::DT_BFLOAT16;
      int64_t elements = 0;
      for (int v = begin; v < end; ++v) {
        const tensorflow::DataType of_this = variables.dtype(v);
        if (of_this != dtype ||
            (dtype != options.dtypes[i] &&
             !(is_half && options.dtypes[i] == tensorflow::DT_FLOAT))) {
          return absl::InvalidArgumentError(absl::StrCat(
              variables.Describe(v), " must be of the dtype ",
              v == begin ? absl::StrCat(DataTypeString(options.dtypes[i]),
                                        " of vector ", i)
                         : absl::StrCat(DataTypeString(dtype), " of ",
                                        variables.Describe(begin)),
              ", got ", DataTypeString(of_this)));
        }
        elements += variables.size(v);
      }
      if (elements != options.sizes[i]) {
        return absl::InvalidArgumentError(absl::StrCat(
            "the ", end - begin, " variables of vector ", i, " must have ",
            options.sizes[i], " elements together, got ", elements));
      }
    }
    for (const int v : counters_) {
      if (IncrementOf(variables.dtype(v)) == nullptr ||
          variables.shape(v).dims() != 0) {
        return absl::InvalidArgumentError(absl::StrCat(
            variables.Describe(v), " must be a scalar of real numbers, got ",
            DataTypeString(variables.dtype(v)), " of shape ",
            variables.shape(v).DebugString()));
      }
    }
    return absl::OkStatus();
  }

  // The variables of a vector.
  struct Range {
    int begin;
    int end;
  };

  Variables::LookupCache lookup_cache_;
  Isa isa_;
  std::vector<Range> vectors_;
  std::vector<int> counters_;
};

WRAPOPT_REGISTER_CPU("AveragingMean", AveragingMeanOp);

}  // namespace
}  // namespace wrapopt
