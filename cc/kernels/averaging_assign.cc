#include <array>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/engine/elementwise.h"
#include "cc/engine/isa.h"
#include "cc/engine/number.h"
#include "cc/kernels/averages.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/registration.h"
#include "cc/kernels/threads.h"
#include "cc/kernels/variables.h"
#include "cc/ops/averaging_assign.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// For resource and ref variables: `Variables` handles the difference.
class AveragingAssignOp : public OpKernel {
 public:
  explicit AveragingAssignOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, FindIsa(&isa_));
    bool use_locking;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("use_locking", &use_locking));
    access_ = use_locking ? Variables::Access::kWrite
                          : Variables::Access::kWriteUnlocked;
    OP_REQUIRES_OK(ctx, contract_.Init(ctx));
    sum_ = NumberOf(contract_.sum_dtype());
  }

  void Compute(OpKernelContext* ctx) override {
    double rate;
    OP_REQUIRES_OK(ctx, ReadRate(ctx, &rate));
    // For each source: the scalars of its stage.
    std::vector<std::array<double, 2>> weights;
    OP_REQUIRES_OK(ctx, ReadWeights(ctx, &weights));
    tensorflow::OpInputList tensors;
    OP_REQUIRES_OK(ctx, ctx->input_list("tensors", &tensors));

    Variables variables(ctx, &lookup_cache_);
    int targets, sources;
    OP_REQUIRES_OK(ctx, variables.Find("targets", access_, &targets));
    OP_REQUIRES_OK(ctx, variables.Find("sources",
                                       Variables::Access::kReadWritten,
                                       &sources));
    OP_REQUIRES_OK(ctx, variables.Lock());
    OP_REQUIRES_OK(ctx, contract_.CheckVariables(variables, targets, sources));
    const int n = contract_.variables();
    for (int p = 0; p < tensors.size(); ++p) {
      OP_REQUIRES_OK(ctx, contract_.CheckTensor(
                              variables, targets, p, tensors[p].dtype(),
                              tensors[p - p % n].dtype(), tensors[p].shape()));
    }
    if (rate == 0) return;
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite());

    Pass pass(sum_);
    auto add_source = [&](int row, tensorflow::DataType dtype) {
      const Number source = NumberOf(dtype);
      pass.AddStage({FindStep(RuleId::kWeightedSum, sum_, source, isa_),
                     weights[row].data(), 2, SizeOf(source),
                     /*new_inputs=*/true, /*scratch=*/0});
    };
    for (int s = 0; s < contract_.sources(); ++s) {
      add_source(s, variables.dtype(sources + s * n));
    }
    for (int s = 0; s < contract_.tensors(); ++s) {
      add_source(contract_.sources() + s, tensors[s * n].dtype());
    }
    for (int t = 0; t < contract_.targets(); ++t) {
      const Number target = NumberOf(variables.dtype(targets + t * n));
      pass.AddStage({FindStep(RuleId::kEma, target, sum_, isa_), &rate, 2,
                     2 * SizeOf(target), /*new_inputs=*/false,
                     /*scratch=*/1});
    }
    std::vector<void*> operands;
    for (int i = 0; i < n; ++i) {
      operands.clear();
      for (int s = 0; s < contract_.sources(); ++s) {
        operands.push_back(nullptr);
        operands.push_back(variables.data(sources + s * n + i));
      }
      for (int s = 0; s < contract_.tensors(); ++s) {
        operands.push_back(nullptr);
        operands.push_back(tensors[s * n + i].data());
      }
      for (int t = 0; t < contract_.targets(); ++t) {
        operands.push_back(variables.data(targets + t * n + i));
        operands.push_back(nullptr);
      }
      pass.AddVariable(variables.size(targets + i), operands);
    }
    OP_REQUIRES_OK(ctx, RunPass(ctx, pass));
  }

 private:
  absl::Status ReadRate(OpKernelContext* ctx, double* rate) const {
    TF_RETURN_IF_ERROR(ReadScalar(ctx, "rate", rate));
    return contract_.CheckRate(*rate);
  }

  absl::Status ReadWeights(OpKernelContext* ctx,
                           std::vector<std::array<double, 2>>* weights) const {
    const Tensor* tensor;
    TF_RETURN_IF_ERROR(ctx->input("weights", &tensor));
    TF_RETURN_IF_ERROR(contract_.CheckWeights(tensor->shape(), tensor));
    for (int s = 0; s < tensor->NumElements(); ++s) {
      weights->push_back({tensor->vec<double>()(s), s == 0 ? 1.0 : 0.0});
    }
    return absl::OkStatus();
  }

  Variables::LookupCache lookup_cache_;
  Isa isa_;
  Variables::Access access_;
  AveragingAssignContract contract_;
  Number sum_;
};

const bool averaging_assign_registered =
    RegisterKernel<AveragingAssignOp>(
        "Wrapopt>AveragingAssign", {"targets", "sources", "weights", "rate"}) &&
    RegisterKernel<AveragingAssignOp>("Wrapopt>AveragingAssignRef",
                                      {"weights", "rate"});

}  // namespace
}  // namespace wrapopt
