// Averages of which a step moves the rows that it touches: Wrapopt>CatchUp and
// Wrapopt>SparseEmaUpdate.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/kernels/averages.h"
#include "cc/kernels/isa.h"
#include "cc/kernels/parallel.h"
#include "cc/kernels/sparse_rows.h"
#include "cc/kernels/variables.h"
#include "cc/ops/contracts.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/mutex.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class LazyAveragesOp : public OpKernel {
 public:
  LazyAveragesOp(OpKernelConstruction* ctx, bool is_step)
      : OpKernel(ctx), is_step_(is_step) {
    Isa isa;
    std::string error;
    OP_REQUIRES(ctx, ChosenIsa(&isa, &error),
                absl::InvalidArgumentError(error));
    OP_REQUIRES_OK(ctx, averages_.Init(ctx, isa));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<double> rates, logs;
    if (is_step_) {
      OP_REQUIRES_OK(ctx, averages_.ReadDecays(ctx, &rates, &logs));
    } else {
      bool behind;
      OP_REQUIRES_OK(ctx, AnyIsBehind(ctx, &behind));
      if (!behind) return;
    }
    tensorflow::OpInputList indices;
    OP_REQUIRES_OK(ctx, ctx->input_list("indices", &indices));

    Variables variables(ctx, &lookup_cache_);
    int shadows, values, log_decays;
    OP_REQUIRES_OK(
        ctx, variables.Find("shadows", Variables::Access::kWrite, &shadows));
    OP_REQUIRES_OK(
        ctx, variables.Find("values", Variables::Access::kRead, &values));
    OP_REQUIRES_OK(ctx, averages_.FindLogDecays(&variables, &log_decays));
    OP_REQUIRES_OK(ctx, variables.Lock());
    OP_REQUIRES_OK(ctx, averages_.Check(variables, shadows, values));
    OP_REQUIRES_OK(ctx,
                   averages_.CheckLogDecays(&variables, log_decays, values));
    std::vector<SparseRows> rows(indices.size());
    for (int i = 0; i < indices.size(); ++i) {
      OP_REQUIRES_OK(ctx, CheckIndices(i, indices[i].shape()));
      OP_REQUIRES_OK(ctx,
                     rows[i].Sort(ctx, indices[i], i, variables, values + i));
    }
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite());

    const IntraOpThreads threads(ctx);
    for (int i = 0; i < averages_.values(); ++i) {
      const std::vector<LazyAverage> averages = averages_.OfValue(
          &variables, shadows, values, log_decays, i, rates, logs);
      for (const LazyAverage& average : averages) {
        if (rows.empty()) {
          average.CatchUpAll(threads);
        } else {
          average.MoveRows(threads, rows[i], is_step_);
        }
      }
    }
  }

 private:
  // Whether there is anything to catch up with. If not, the averages and their
  // values need not be there yet.
  absl::Status AnyIsBehind(OpKernelContext* ctx, bool* behind) const {
    int start, stop;
    TF_RETURN_IF_ERROR(InputRange("log_decays", &start, &stop));
    *behind = false;
    for (int input = start; input < stop && !*behind; ++input) {
      const Tensor& handle = ctx->input(input);
      tensorflow::core::RefCountPtr<tensorflow::Var> var;
      // What is wrong with a handle is for Variables to say.
      if (handle.NumElements() != 1) {
        *behind = true;
        continue;
      }
      const absl::Status found = LookupResource(
          ctx, handle.scalar<tensorflow::ResourceHandle>()(), &var);
      if (absl::IsNotFound(found)) continue;
      if (!found.ok()) {
        *behind = true;
        continue;
      }
      tensorflow::tf_shared_lock lock(*var->mu());
      if (!var->is_initialized) continue;
      const Tensor& numbers = *var->tensor();
      *behind = numbers.dtype() != tensorflow::DT_DOUBLE ||
                numbers.NumElements() == 0 ||
                numbers.flat<double>()(numbers.NumElements() - 1) != 0;
    }
    return absl::OkStatus();
  }

  const bool is_step_;
  Variables::LookupCache lookup_cache_;
  Averages averages_;
};

class CatchUpOp : public LazyAveragesOp {
 public:
  explicit CatchUpOp(OpKernelConstruction* ctx)
      : LazyAveragesOp(ctx, /*is_step=*/false) {}
};

class SparseEmaUpdateOp : public LazyAveragesOp {
 public:
  explicit SparseEmaUpdateOp(OpKernelConstruction* ctx)
      : LazyAveragesOp(ctx, /*is_step=*/true) {}
};

REGISTER_KERNEL_BUILDER(
    Name("Wrapopt>CatchUp").Device(tensorflow::DEVICE_CPU), CatchUpOp);
REGISTER_KERNEL_BUILDER(
    Name("Wrapopt>SparseEmaUpdate").Device(tensorflow::DEVICE_CPU),
    SparseEmaUpdateOp);

}  // namespace
}  // namespace wrapopt
