// Wrapopt>AveragingMean: the end of an averaging round whose center is in
// variables.
#include <cstdint>
#include <mutex>  // NOLINT(build/c++11)
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/engine/elementwise.h"
#include "cc/engine/isa.h"
#include "cc/engine/number.h"
#include "cc/engine/rounds.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/parallel.h"
#include "cc/kernels/rounds_resource.h"
#include "cc/kernels/variables.h"
#include "cc/ops/averaging_rounds.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/register_types.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::DataTypeString;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

bool CanCount(tensorflow::DataType dtype) {
  switch (dtype) {
#define WRAPOPT_CASE(T)                     \
  case tensorflow::DataTypeToEnum<T>::value: \
    return true;
    TF_CALL_REAL_NUMBER_TYPES(WRAPOPT_CASE)
#undef WRAPOPT_CASE
    default:
      return false;
  }
}

template <class T>
void IncrementOf(Tensor* count) {
  T& x = count->scalar<T>()();
  if constexpr (std::is_integral_v<T>) {
    // The sum may overflow.
    x = static_cast<T>(static_cast<std::make_unsigned_t<T>>(x) + 1u);
  } else {
    x = x + T(1);
  }
}

void Increment(Tensor* count) {
  switch (count->dtype()) {
#define WRAPOPT_CASE(T)                     \
  case tensorflow::DataTypeToEnum<T>::value: \
    return IncrementOf<T>(count);
    TF_CALL_REAL_NUMBER_TYPES(WRAPOPT_CASE)
#undef WRAPOPT_CASE
    default:
      return;
  }
}

class AveragingMeanOp : public OpKernel {
 public:
  explicit AveragingMeanOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, FindIsa(&isa_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("sizes", &sizes_));
    OP_REQUIRES_OK(ctx, CheckGroups(sizes_, num_inputs() - 2));
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
    const size_t n = sizes_.size();
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

    int variable = 0;
    for (size_t i = 0; i < n; ++i) {
      const Number to = NumberOf(variables.dtype(variable));
      const Number from = NumberOf(options.dtypes[i]);
      const double assign = 1;
      Pass pass;
      pass.AddStage({FindStep(RuleId::kEma, to, from, isa_), &assign, 2,
                     SizeOf(from) + SizeOf(to), /*new_inputs=*/true});
      char* data = static_cast<char*>(mean[i].data());
      for (int64_t k = 0; k < sizes_[i]; ++k, ++variable) {
        pass.AddVariable(variables.size(variable),
                         {variables.data(variable), data});
        data += variables.size(variable) * SizeOf(from);
      }
      TF_RETURN_IF_ERROR(RunPass(ctx, pass));
    }
    for (; variable < num_inputs() - 2; ++variable) {
      Increment(variables.tensor(variable));
    }
    return absl::OkStatus();
  }

  absl::Status Check(const Variables& variables,
                     const RoundsOptions& options) const {
    int variable = 0;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      const tensorflow::DataType dtype = variables.dtype(variable);
      const bool is_half =
          dtype == tensorflow::DT_HALF || dtype == tensorflow::DT_BFLOAT16;
      int64_t elements = 0;
      for (int64_t k = 0; k < sizes_[i]; ++k, ++variable) {
        const tensorflow::DataType of_this = variables.dtype(variable);
        if (of_this != dtype ||
            (dtype != options.dtypes[i] &&
             !(is_half && options.dtypes[i] == tensorflow::DT_FLOAT))) {
          return absl::InvalidArgumentError(absl::StrCat(
              variables.Describe(variable), " must be of the dtype ",
              k == 0 ? absl::StrCat(DataTypeString(options.dtypes[i]),
                                    " of vector ", i)
                     : absl::StrCat(DataTypeString(dtype), " of ",
                                    variables.Describe(variable - k)),
              ", got ", DataTypeString(of_this)));
        }
        elements += variables.size(variable);
      }
      if (elements != options.sizes[i]) {
        return absl::InvalidArgumentError(absl::StrCat(
            "the ", sizes_[i], " variables of vector ", i, " must have ",
            options.sizes[i], " elements together, got ", elements));
      }
    }
    for (; variable < num_inputs() - 2; ++variable) {
      const tensorflow::DataType dtype = variables.dtype(variable);
      if (!CanCount(dtype) || variables.shape(variable).dims() != 0) {
        return absl::InvalidArgumentError(absl::StrCat(
            variables.Describe(variable), " must be a scalar of real numbers, ",
            "got ", DataTypeString(dtype), " of shape ",
            variables.shape(variable).DebugString()));
      }
    }
    return absl::OkStatus();
  }

  Variables::LookupCache lookup_cache_;
  Isa isa_;
  std::vector<int64_t> sizes_;
};

REGISTER_KERNEL_BUILDER(
    Name("Wrapopt>AveragingMean").Device(tensorflow::DEVICE_CPU),
    AveragingMeanOp);

}  // namespace
}  // namespace wrapopt
