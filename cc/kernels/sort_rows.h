// Sorts the indices of a sparse gradient that is an op's input.
#ifndef WRAPOPT_CC_KERNELS_SORT_ROWS_H_
#define WRAPOPT_CC_KERNELS_SORT_ROWS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/engine/sparse_rows.h"
#include "cc/engine/threads.h"
#include "cc/ops/contracts.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace wrapopt {

// `indices` is element `i` of the input "indices". Each must be a row of the
// variable `name`, which has `rows` rows. If one is not, nothing is sorted.
template <class Index>
absl::Status SortRows(const Threads& threads, const Index* indices,
                      int64_t count, int i, int64_t rows,
                      const std::string& name, SparseRows* sorted) {
  const RowGrad* const bad = sorted->Sort(threads, indices, count, rows);
  if (bad == nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "indices[", i, "][", bad->position, "] must be in [0, ", rows,
      "), the rows of ", name, ", got ", bad->row));
}

// The same for a vector of int32 or int64, and for variable `variable`.
absl::Status SortRows(tensorflow::OpKernelContext* ctx,
                      const tensorflow::Tensor& indices, int i,
                      const CheckedVariables& variables, int variable,
                      SparseRows* sorted);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_SORT_ROWS_H_
