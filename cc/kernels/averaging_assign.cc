#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/kernels/averages.h"
#include "cc/kernels/elementwise_cpu.h"
#include "cc/kernels/isa.h"
#include "cc/kernels/number.h"
#include "cc/kernels/parallel.h"
#include "cc/kernels/variables.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::DataType;
using tensorflow::DataTypeString;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// Serves resource and ref variables: `Variables` knows the difference.
class AveragingAssignOp : public OpKernel {
 public:
  explicit AveragingAssignOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string error;
    OP_REQUIRES(ctx, ChosenIsa(&isa_, &error),
                absl::InvalidArgumentError(error));
    bool use_locking;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("use_locking", &use_locking));
    access_ = use_locking ? Variables::Access::kWrite
                          : Variables::Access::kWriteUnlocked;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &n_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    sum_ = dtype_ == tensorflow::DT_DOUBLE ? Number::kDouble : Number::kFloat;
    OP_REQUIRES_OK(ctx, CountRows("targets", &targets_));
    OP_REQUIRES_OK(ctx, CountRows("sources", &sources_));
    OP_REQUIRES_OK(ctx, CountRows("tensors", &tensors_));
    OP_REQUIRES(ctx, targets_ > 0 && sources_ + tensors_ > 0,
                absl::InvalidArgumentError(absl::StrCat(
                    "each variable must have a target and a source, got ",
                    targets_, " targets and ", sources_ + tensors_,
                    " sources")));
  }

  void Compute(OpKernelContext* ctx) override {
    double rate;
    OP_REQUIRES_OK(ctx, ReadRate(ctx, &rate));
    // Of each source: the scalars of its stage.
    std::vector<std::array<double, 2>> weights;
    OP_REQUIRES_OK(ctx, ReadWeights(ctx, &weights));
    tensorflow::OpInputList tensors;
    OP_REQUIRES_OK(ctx, ctx->input_list("tensors", &tensors));

    Variables variables(ctx, &memory_);
    int targets, sources;
    OP_REQUIRES_OK(ctx, variables.Find("targets", access_, &targets));
    OP_REQUIRES_OK(ctx, variables.Find("sources",
                                       Variables::Access::kReadWritten,
                                       &sources));
    OP_REQUIRES_OK(ctx, variables.Lock());
    for (int v = targets; v < targets + n_ * targets_; ++v) {
      OP_REQUIRES_OK(ctx, CheckVariable(variables, targets, targets, v));
    }
    for (int v = sources; v < sources + n_ * sources_; ++v) {
      OP_REQUIRES_OK(ctx, CheckVariable(variables, targets, sources, v));
      OP_REQUIRES_OK(ctx, CheckOwnTarget(variables, targets, sources, v));
    }
    for (int p = 0; p < n_ * tensors_; ++p) {
      OP_REQUIRES_OK(ctx, CheckTensor(variables, targets, tensors, p));
    }
    if (rate == 0) return;
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite());

    Pass pass(sum_);
    auto dtype = [&](int variable) {
      return NumberOf(variables.tensor(variable)->dtype());
    };
    for (int s = 0; s < sources_ + tensors_; ++s) {
      const Number source =
          s < sources_ ? dtype(sources + s * n_)
                       : NumberOf(tensors[(s - sources_) * n_].dtype());
      pass.AddStage({FindStep(RuleId::kWeightedSum, sum_, source, isa_),
                     weights[s].data(), 2, SizeOf(source), /*new_inputs=*/true,
                     /*scratch=*/0});
    }
    for (int t = 0; t < targets_; ++t) {
      const Number target = dtype(targets + t * n_);
      pass.AddStage({FindStep(RuleId::kEma, target, sum_, isa_), &rate, 2,
                     2 * SizeOf(target), /*new_inputs=*/false,
                     /*scratch=*/1});
    }
    std::vector<void*> operands;
    for (int i = 0; i < n_; ++i) {
      operands.clear();
      for (int s = 0; s < sources_; ++s) {
        operands.push_back(nullptr);
        operands.push_back(variables.data(sources + s * n_ + i));
      }
      for (int s = 0; s < tensors_; ++s) {
        operands.push_back(nullptr);
        operands.push_back(tensors[s * n_ + i].data());
      }
      for (int t = 0; t < targets_; ++t) {
        operands.push_back(variables.data(targets + t * n_ + i));
        operands.push_back(nullptr);
      }
      pass.AddVariable(variables.size(targets + i), operands);
    }
    OP_REQUIRES_OK(ctx, RunPass(ctx, pass));
  }

 private:
  // How many rows of N an input list has.
  absl::Status CountRows(const char* list, int* rows) const {
    int start, stop;
    TF_RETURN_IF_ERROR(InputRange(list, &start, &stop));
    *rows = (stop - start) / n_;
    if ((stop - start) % n_ == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(list, " must be rows of N = ", n_, ", got ",
                     stop - start));
  }

  static absl::Status ReadRate(OpKernelContext* ctx, double* rate) {
    const Tensor* tensor;
    TF_RETURN_IF_ERROR(ctx->input("rate", &tensor));
    if (tensor->dims() != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("rate misshapen: got ", tensor->shape().DebugString(),
                       " but expected [] (a scalar)"));
    }
    *rate = tensor->scalar<double>()();
    if (*rate >= 0 && *rate <= 1) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("rate must be in [0, 1], got ", *rate));
  }

  absl::Status ReadWeights(OpKernelContext* ctx,
                           std::vector<std::array<double, 2>>* weights) const {
    const Tensor* tensor;
    TF_RETURN_IF_ERROR(ctx->input("weights", &tensor));
    const int count = sources_ + tensors_;
    if (tensor->dims() != 1 || tensor->NumElements() != count) {
      return absl::InvalidArgumentError(absl::StrCat(
          "weights misshapen: got ", tensor->shape().DebugString(),
          " but expected [", count, "] (one weight for each source)"));
    }
    for (int s = 0; s < count; ++s) {
      const double weight = tensor->vec<double>()(s);
      if (!std::isfinite(weight)) {
        return absl::InvalidArgumentError(absl::StrCat(
            "weights[", s, "] must be finite, got ", weight));
      }
      weights->push_back({weight, s == 0 ? 1.0 : 0.0});
    }
    return absl::OkStatus();
  }

  // Whether a dtype is the op's, or float where that is half or bfloat16.
  bool Fits(DataType dtype) const {
    return dtype == dtype_ ||
           (dtype == tensorflow::DT_FLOAT && sum_ == Number::kFloat);
  }

  // For a dtype that does not fit, or is not that of the first of its row.
  absl::Status DtypeError(const std::string& subject, DataType got,
                          const std::string& first_subject,
                          DataType first) const {
    if (Fits(got)) {
      return absl::InvalidArgumentError(absl::StrCat(
          subject, " must be of dtype ", DataTypeString(first),
          " (the dtype of ", first_subject, ", the first of its row), got ",
          DataTypeString(got)));
    }
    return absl::InvalidArgumentError(absl::StrCat(
        subject, " must be of dtype ", DataTypeString(dtype_), ", the op's",
        Fits(tensorflow::DT_FLOAT) && dtype_ != tensorflow::DT_FLOAT
            ? ", or float"
            : "",
        ", got ", DataTypeString(got)));
  }

  // The dtype and shape of one variable of the list that begins at `first`.
  absl::Status CheckVariable(Variables& variables, int targets, int first,
                             int variable) const {
    const int row = variable - (variable - first) % n_;
    const DataType got = variables.tensor(variable)->dtype();
    const DataType expected = variables.tensor(row)->dtype();
    if (got != expected || !Fits(got)) {
      return DtypeError(variables.Describe(variable), got,
                        variables.Describe(row), expected);
    }
    return variables.CheckSameShape(variable,
                                    targets + (variable - first) % n_);
  }

  // A source that is written, too, is so where it is read: elsewhere it would
  // be luck whether it is read before or after.
  absl::Status CheckOwnTarget(const Variables& variables, int targets,
                              int sources, int source) const {
    const int target = variables.Written(source);
    if (target < 0 || (target - targets) % n_ == (source - sources) % n_) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat(
        variables.Describe(target), " and ", variables.Describe(source),
        " are one variable: a target may be a source of its own mean, not of "
        "another's"));
  }

  absl::Status CheckTensor(const Variables& variables, int targets,
                           const tensorflow::OpInputList& tensors,
                           int position) const {
    const int row = position - position % n_;
    const DataType got = tensors[position].dtype();
    const DataType expected = tensors[row].dtype();
    if (got != expected || !Fits(got)) {
      return DtypeError(absl::StrCat("tensors[", position, "]"), got,
                        absl::StrCat("tensors[", row, "]"), expected);
    }
    return variables.CheckSameShape(tensors[position], "tensors", position,
                                    targets + position % n_);
  }

  Variables::Memory memory_;
  Isa isa_;
  Variables::Access access_;
  int n_;
  int targets_, sources_, tensors_;  // For each of the N.
  DataType dtype_;
  Number sum_;
};

REGISTER_KERNEL_BUILDER(
    Name("Wrapopt>AveragingAssign").Device(tensorflow::DEVICE_CPU),
    AveragingAssignOp);
REGISTER_KERNEL_BUILDER(
    Name("Wrapopt>AveragingAssignRef").Device(tensorflow::DEVICE_CPU),
    AveragingAssignOp);
REGISTER_KERNEL_BUILDER(Name("Wrapopt>AveragingAssign")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("targets")
                            .HostMemory("sources")
                            .HostMemory("weights")
                            .HostMemory("rate"),
                        AveragingAssignOp);
REGISTER_KERNEL_BUILDER(Name("Wrapopt>AveragingAssignRef")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("weights")
                            .HostMemory("rate"),
                        AveragingAssignOp);

}  // namespace
}  // namespace wrapopt
