// Averages of which a step moves the rows that it touches: Wrapopt>CatchUp and
// Wrapopt>SparseEmaUpdate.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/kernels/averages.h"
#include "cc/kernels/averages_gpu.h"
#include "cc/kernels/gpu.h"
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

    std::vector<std::vector<LazyAverage>> averages;
    for (int i = 0; i < averages_.values(); ++i) {
      averages.push_back(averages_.OfValue(&variables, shadows, values,
                                           log_decays, i, rates, logs));
    }
    if (IsOnGpu(ctx)) {
      OP_REQUIRES_OK(ctx, RunOnGpu(ctx, averages, rows, rates));
      const int n = averages_.values() * averages_.per_value();
      for (int i = log_decays; rows.empty() && i < log_decays + n; ++i) {
        OP_REQUIRES_OK(ctx, ZeroOnGpu(ctx, variables.tensor(i)));
      }
      return;
    }
    const IntraOpThreads threads(ctx);
    for (int i = 0; i < averages_.values(); ++i) {
      for (const LazyAverage& average : averages[i]) {
        if (rows.empty()) {
          average.CatchUpAll(threads);
        } else {
          average.MoveRows(threads, rows[i], is_step_);
        }
      }
    }
  }

 private:
  // What LazyAverage does for these rows of each value, or for all where there are
  // no `rows`, but for the zeros that it leaves then.
  absl::Status RunOnGpu(OpKernelContext* ctx,
                        const std::vector<std::vector<LazyAverage>>& averages,
                        const std::vector<SparseRows>& rows,
                        std::vector<double> rates) const {
    rates.resize(averages_.per_value());
    Pass pass;
    averages_.AddStages(rates, /*value_bytes=*/0, &pass);
    LazyRows lazy;
    lazy.is_step = is_step_;
    gpu::RowMarks marks;
    std::vector<void*> operands;
    std::vector<int64_t> touched;
    for (int i = 0; i < averages_.values(); ++i) {
      const LazyAverage& first = averages[i].front();
      auto add = [&](int64_t begin, int64_t end) {
        operands.clear();
        AddLazyRows(averages[i], begin, end, &operands, &lazy);
        pass.AddVariable((end - begin) * first.row_elements, operands);
      };
      const bool as_one = AreAsOne(first.row_elements);
      if (rows.empty()) {
        for (int64_t begin = 0, end; begin < first.rows; begin = end) {
          end = as_one ? first.rows : begin + 1;
          add(begin, end);
        }
        continue;
      }
      touched.clear();
      for (int64_t j = 0; j < rows[i].size(); j = rows[i].EndOfRow(j)) {
        touched.push_back(rows[i][j].row);
      }
      for (size_t u = 0, end; u < touched.size(); u = end) {
        end = u + 1;
        while (as_one && end < touched.size() &&
               touched[end] == touched[end - 1] + 1) {
          ++end;
        }
        add(touched[u], touched[end - 1] + 1);
      }
      AddMarks(averages[i], touched, &marks);
    }
    TF_RETURN_IF_ERROR(RunPassOnGpu(ctx, pass, &lazy));
    return MarkRowsOnGpu(ctx, marks);
  }

  // Whether there is anything to catch up with. If not, the averages and their
  // values need not be there yet. Of what a GPU has, only that there is something
  // is known here: its rates may all be zero.
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
      *behind = IsOnGpu(ctx) || numbers.dtype() != tensorflow::DT_DOUBLE ||
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
REGISTER_KERNEL_BUILDER(Name("Wrapopt>CatchUp")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("shadows")
                            .HostMemory("values")
                            .HostMemory("log_decays")
                            .HostMemory("indices"),
                        CatchUpOp);
REGISTER_KERNEL_BUILDER(Name("Wrapopt>SparseEmaUpdate")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("shadows")
                            .HostMemory("values")
                            .HostMemory("log_decays")
                            .HostMemory("indices")
                            .HostMemory("decays"),
                        SparseEmaUpdateOp);

}  // namespace
}  // namespace wrapopt
