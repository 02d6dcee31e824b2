// Wrapopt>CatchUp, Wrapopt>ReadAverages and Wrapopt>SparseEmaUpdate: averages
// whose rows may lag behind.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/engine/isa.h"
#include "cc/engine/sparse_rows.h"
#include "cc/kernels/averages.h"
#include "cc/kernels/averages_gpu.h"
#include "cc/kernels/gpu.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/registration.h"
#include "cc/kernels/sort_rows.h"
#include "cc/kernels/threads.h"
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

enum class Kind { kCatchUp, kRead, kStep };

template <Kind kind>
class LazyAveragesOp : public OpKernel {
 public:
  explicit LazyAveragesOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    Isa isa;
    OP_REQUIRES_OK(ctx, FindIsa(&isa));
    OP_REQUIRES_OK(ctx, averages_.Init(ctx, isa));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<double> rates, logs;
    if (kind == Kind::kStep) {
      OP_REQUIRES_OK(ctx, averages_.ReadDecays(ctx, &rates, &logs));
    } else if (kind == Kind::kRead) {
      bool done = false;
      OP_REQUIRES_OK(ctx, ReadIfUpToDate(ctx, &done));
      if (done) return;
    } else {
      bool behind = false;
      OP_REQUIRES_OK(ctx, AnyIsBehind(ctx, &behind));
      if (!behind) return;
    }
    tensorflow::OpInputList indices;
    if (kind != Kind::kRead) {
      OP_REQUIRES_OK(ctx, ctx->input_list("indices", &indices));
    }

    Variables variables(ctx, &lookup_cache_);
    int shadows, values, log_decays;
    OP_REQUIRES_OK(
        ctx, variables.Find("shadows", Variables::Access::kWrite, &shadows));
    OP_REQUIRES_OK(
        ctx, variables.Find("values", Variables::Access::kRead, &values));
    OP_REQUIRES_OK(ctx, variables.FindOrMake(
                            "log_decays", Variables::Access::kWrite,
                            tensorflow::DT_DOUBLE, &log_decays));
    OP_REQUIRES_OK(ctx, variables.Lock());
    OP_REQUIRES_OK(ctx, averages_.Check(variables, shadows, values));
    OP_REQUIRES_OK(ctx,
                   averages_.CheckLogDecays(variables, log_decays, values));
    averages_.ShapeLogDecays(&variables, log_decays, values);
    std::vector<SparseRows> rows(indices.size());
    for (int i = 0; i < indices.size(); ++i) {
      OP_REQUIRES_OK(ctx, CheckIndices(i, indices[i].shape()));
      OP_REQUIRES_OK(ctx,
                     SortRows(ctx, indices[i], i, variables, values + i,
                              &rows[i]));
    }
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite());

    std::vector<std::vector<LazyAverage>> averages;
    for (int i = 0; i < averages_.values(); ++i) {
      averages.push_back(averages_.OfValue(&variables, shadows, values,
                                           log_decays, i, rates, logs));
    }
    OP_REQUIRES_OK(ctx, IsOnGpu(ctx)
                            ? RunOnGpu(ctx, averages, rows, rates)
                            : RunOnCpu(ctx, variables, values, averages, rows));
    const int n = averages_.values() * averages_.per_value();
    for (int i = 0; i < n; ++i) {
      if (IsOnGpu(ctx) && rows.empty()) {
        OP_REQUIRES_OK(ctx, ZeroOnGpu(ctx, variables.tensor(log_decays + i)));
      }
      if (kind == Kind::kRead) {
        OP_REQUIRES_OK(ctx, Output(ctx, &variables, shadows, i));
      }
    }
  }

 private:
  // Moves these rows of each average, or all rows if `rows` is empty.
  absl::Status RunOnCpu(OpKernelContext* ctx, const Variables& variables,
                        int values,
                        const std::vector<std::vector<LazyAverage>>& averages,
                        const std::vector<SparseRows>& rows) const {
    const IntraOpThreads threads(ctx);
    for (int i = 0; i < averages_.values(); ++i) {
      // In a step, the inner optimizer may have moved the value's buffer.
      if (kind != Kind::kStep) {
        averages_.WarnIfReplaced(variables, values + i, averages[i]);
      }
      for (const LazyAverage& average : averages[i]) {
        if (rows.empty()) {
          average.CatchUpAll(threads);
        } else {
          average.MoveRows(threads, rows[i], kind == Kind::kStep);
        }
      }
    }
    return absl::OkStatus();
  }

  // Outputs average `i`. An op that holds the output makes later steps copy the
  // average, as after ReadVariableOp.
  static absl::Status Output(OpKernelContext* ctx, Variables* variables,
                             int shadows, int i) {
    Tensor average;
    TF_RETURN_IF_ERROR(variables->Read(shadows + i, &average));
    ctx->set_output(i, average);
    return absl::OkStatus();
  }

  // Outputs the averages if no row lags behind. That takes no exclusive lock,
  // and needs no value.
  absl::Status ReadIfUpToDate(OpKernelContext* ctx, bool* done) {
    *done = false;
    if (IsOnGpu(ctx)) return absl::OkStatus();
    Variables variables(ctx, &read_lookup_cache_);
    int shadows, log_decays;
    TF_RETURN_IF_ERROR(
        variables.Find("shadows", Variables::Access::kRead, &shadows));
    TF_RETURN_IF_ERROR(variables.FindOrMake("log_decays",
                                            Variables::Access::kRead,
                                            tensorflow::DT_DOUBLE,
                                            &log_decays));
    TF_RETURN_IF_ERROR(variables.Lock());
    const int n = averages_.values() * averages_.per_value();
    for (int i = 0; i < n; ++i) {
      const int at = log_decays + i;
      if (!variables.has_value(at)) continue;
      const Tensor& sums = *variables.tensor(at);
      const int64_t rows =
          sums.NumElements() - ShadowContract::kMoreLogDecays;
      // CheckLogDecays reports errors in them.
      if (sums.dtype() != tensorflow::DT_DOUBLE || rows < 0 ||
          sums.flat<double>()(rows) != 0) {
        return absl::OkStatus();
      }
    }
    for (int i = 0; i < n; ++i) {
      TF_RETURN_IF_ERROR(
          variables.CheckDtype(shadows + i, averages_.shadow_dtype()));
      TF_RETURN_IF_ERROR(Output(ctx, &variables, shadows, i));
    }
    *done = true;
    return absl::OkStatus();
  }

  // Does the same on a GPU. If `rows` is empty, the caller must set the log
  // decays to zero.
  absl::Status RunOnGpu(OpKernelContext* ctx,
                        const std::vector<std::vector<LazyAverage>>& averages,
                        const std::vector<SparseRows>& rows,
                        std::vector<double> rates) const {
    rates.resize(averages_.per_value());
    Pass pass;
    averages_.AddStages(rates, /*value_bytes=*/0, &pass);
    LazyRows lazy;
    lazy.is_step = kind == Kind::kStep;
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

  // Whether any row lags behind. If none does, the averages and their values
  // need not exist yet. Log decays in GPU memory cannot be read here, so rows
  // count as lagging behind if the log decays exist.
  absl::Status AnyIsBehind(OpKernelContext* ctx, bool* behind) const {
    int start, stop;
    TF_RETURN_IF_ERROR(InputRange("log_decays", &start, &stop));
    *behind = false;
    for (int input = start; input < stop && !*behind; ++input) {
      const Tensor& handle = ctx->input(input);
      tensorflow::core::RefCountPtr<tensorflow::Var> var;
      // Variables reports errors in a handle.
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
      const int64_t rows =
          numbers.NumElements() - ShadowContract::kMoreLogDecays;
      *behind = IsOnGpu(ctx) || numbers.dtype() != tensorflow::DT_DOUBLE ||
                rows < 0 || numbers.flat<double>()(rows) != 0;
    }
    return absl::OkStatus();
  }

  Variables::LookupCache lookup_cache_;
  Variables::LookupCache read_lookup_cache_;
  Averages averages_;
};

const bool lazy_averages_registered =
    RegisterKernel<LazyAveragesOp<Kind::kRead>>(
        "Wrapopt>ReadAverages", {"shadows", "values", "log_decays"}) &&
    RegisterKernel<LazyAveragesOp<Kind::kCatchUp>>(
        "Wrapopt>CatchUp", {"shadows", "values", "log_decays", "indices"}) &&
    RegisterKernel<LazyAveragesOp<Kind::kStep>>(
        "Wrapopt>SparseEmaUpdate",
        {"shadows", "values", "log_decays", "indices", "decays"});

}  // namespace
}  // namespace wrapopt
