// The work of cc/engine/row_step.h on a GPU, for many variables at once.
#ifndef WRAPOPT_CC_KERNELS_ROWS_GPU_H_
#define WRAPOPT_CC_KERNELS_ROWS_GPU_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "cc/engine/elementwise.h"
#include "cc/engine/lazy_average.h"
#include "cc/engine/sparse_rows.h"
#include "cc/kernels/averages.h"
#include "cc/kernels/gpu.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {

// The different rows of a sparse gradient, sorted, and their gradients in
// device memory.
struct RowsOnGpu {
  struct Row {
    int64_t index;
    const void* grad;
  };

  // If a row has several gradients in `values`, it sums those of all rows.
  absl::Status Find(tensorflow::OpKernelContext* ctx,
                    const tensorflow::Tensor& values, const SparseRows& sorted,
                    tensorflow::DataType sum_dtype);

  std::vector<Row> rows;
  bool are_sums = false;
  int64_t grad_bytes = 0;  // Of a row.

 private:
  tensorflow::Tensor sums_;
};

// A variable of which rows take a step.
struct RowsUpdate {
  const RowsOnGpu* grads;
  int64_t rows, row_elements;  // Of the variable.
  std::vector<void*> states;
  std::vector<LazyAverage> averages;  // Those that are lazy.
};

// Takes the step of a rule: `sum_step` is the one for sums of gradients.
struct RowsStep {
  const RuleInfo& rule;
  const RuleStep& step;
  const RuleStep& sum_step;
  const double* scalars;
  const Averages& averages;
  const std::vector<double>& rates;

  absl::Status Run(tensorflow::OpKernelContext* ctx,
                   const std::vector<RowsUpdate>& updates) const;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_ROWS_GPU_H_
