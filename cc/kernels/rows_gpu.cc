#include "cc/kernels/rows_gpu.h"

#include "cc/gpu/launcher.h"
#include "cc/kernels/averages_gpu.h"
#include "cc/kernels/inputs.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace wrapopt {
namespace {

// The launcher's name for an array of zeros, and for one that is not there.
constexpr void* kNoRows = nullptr;

char* At(const void* array, int64_t bytes) {
  return static_cast<char*>(const_cast<void*>(array)) + bytes;
}

}  // namespace

absl::Status RowsOnGpu::Find(tensorflow::OpKernelContext* ctx,
                             const tensorflow::Tensor& values,
                             const SparseRows& sorted,
                             tensorflow::DataType sum_dtype) {
  if (sorted.size() == 0) return absl::OkStatus();
  are_sums = sorted.repeat();
  const int64_t elements = values.NumElements() / sorted.size();
  grad_bytes = elements * tensorflow::DataTypeSize(are_sums ? sum_dtype
                                                            : values.dtype());
  gpu::RowSum sum;
  for (int64_t j = 0; j < sorted.size(); ++j) {
    const int64_t position = sorted[j].position;
    if (sorted.BeginsRow(j)) {
      rows.push_back({sorted[j].row, At(values.data(), position * grad_bytes)});
      if (are_sums) sum.runs.push_back({sum.runs.size(), {}});
    }
    if (are_sums) sum.runs.back().grads.push_back(position);
  }
  if (!are_sums) return absl::OkStatus();
  TF_RETURN_IF_ERROR(ctx->allocate_temp(
      sum_dtype,
      tensorflow::TensorShape({static_cast<int64_t>(rows.size()), elements}),
      &sums_));
  TF_RETURN_IF_ERROR(ZeroOnGpu(ctx, &sums_));
  for (size_t r = 0; r < rows.size(); ++r) {
    rows[r].grad = At(sums_.data(), r * grad_bytes);
  }
  sum.grads = reinterpret_cast<gpu::Address>(values.data());
  sum.number = NumberOf(values.dtype());
  sum.sums = reinterpret_cast<gpu::Address>(sums_.data());
  sum.is_double = sum_dtype == tensorflow::DT_DOUBLE;
  sum.elements = elements;
  return SumRowsOnGpu(ctx, sum);
}

// The launcher gets a row, or several consecutive rows, as a variable.
absl::Status RowsStep::Run(tensorflow::OpKernelContext* ctx,
                           const std::vector<RowsUpdate>& updates) const {
  const int64_t bytes = SizeOf(step.state);
  const bool lazy = averages.lazy();
  const int operands_of_step = static_cast<int>(CountNames(rule.states)) + 1;
  gpu::RowMarks marks;
  for (const bool summed : {false, true}) {
    Pass pass;
    LazyRows lazy_rows;
    pass.AddStage({summed ? sum_step : step, scalars, operands_of_step, 0,
                   /*new_inputs=*/true});
    if (lazy) averages.AddStages(rates, /*value_bytes=*/0, &pass);
    std::vector<void*> operands;
    for (const RowsUpdate& update : updates) {
      const RowsOnGpu& grads = *update.grads;
      const int64_t row = update.row_elements;
      if (grads.are_sums != summed || update.rows == 0 || row == 0) continue;
      // Rows [begin, end), whose gradients are those from `first` on.
      auto add = [&](const RowsOnGpu::Row* first, int64_t begin, int64_t end) {
        operands.clear();
        for (void* const state : update.states) {
          operands.push_back(At(state, begin * row * bytes));
        }
        operands.push_back(first == nullptr ? kNoRows
                                            : const_cast<void*>(first->grad));
        if (lazy) {
          AddLazyRows(update.averages, begin, end, &operands, &lazy_rows);
        }
        pass.AddVariable((end - begin) * row, operands);
      };
      // Whether a row and its arrays lie behind those of the row before it.
      auto follows = [&](const RowsOnGpu::Row& next) {
        const RowsOnGpu::Row& last = *(&next - 1);
        return (!lazy || AreAsOne(row)) && next.index == last.index + 1 &&
               static_cast<const char*>(next.grad) -
                       static_cast<const char*>(last.grad) ==
                   grads.grad_bytes;
      };
      int64_t next = 0;
      std::vector<int64_t> touched;
      for (size_t r = 0; r < grads.rows.size();) {
        size_t end = r + 1;
        while (end < grads.rows.size() && follows(grads.rows[end])) ++end;
        const int64_t begin = grads.rows[r].index;
        if (rule.sparse == Sparse::kAll) add(nullptr, next, begin);
        next = grads.rows[end - 1].index + 1;
        add(&grads.rows[r], begin, next);
        for (; r < end; ++r) touched.push_back(grads.rows[r].index);
      }
      if (rule.sparse == Sparse::kAll) add(nullptr, next, update.rows);
      if (lazy) AddMarks(update.averages, touched, &marks);
    }
    TF_RETURN_IF_ERROR(RunPassOnGpu(ctx, pass, lazy ? &lazy_rows : nullptr));
  }
  return lazy ? MarkRowsOnGpu(ctx, marks) : absl::OkStatus();
}

}  // namespace wrapopt
