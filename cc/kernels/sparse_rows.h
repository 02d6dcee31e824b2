// The gradients of a sparse gradient, sorted by row.
#ifndef WRAPOPT_CC_KERNELS_SPARSE_ROWS_H_
#define WRAPOPT_CC_KERNELS_SPARSE_ROWS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "cc/kernels/elementwise_cpu.h"
#include "cc/kernels/threads.h"
#include "cc/ops/contracts.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace wrapopt {

// Gradients of one row keep the order in which they came, and are summed in it:
// the number of threads changes no bit of a result.
class SparseRows {
 public:
  // Sorts the vector `indices` of int32 or int64, which is number `i` of that
  // input. All must be rows of `variable`; if not, nothing is sorted.
  absl::Status Sort(tensorflow::OpKernelContext* ctx,
                    const tensorflow::Tensor& indices, int i,
                    const CheckedVariables& variables, int variable);
  // The same of `count` indices, for a variable of so many rows, which is called
  // `name`.
  template <class Index>
  absl::Status Sort(const Threads& threads, const Index* indices,
                    int64_t count, int i, int64_t rows,
                    const std::string& name);

  int64_t size() const { return size_; }
  const RowGrad& operator[](int64_t j) const { return grads_[j]; }

  // Whether gradient `j` is the first of its row.
  bool BeginsRow(int64_t j) const {
    return j == 0 || grads_[j].row != grads_[j - 1].row;
  }
  // One past the last gradient of the row of `j`.
  int64_t EndOfRow(int64_t j) const {
    const int64_t row = grads_[j].row;
    while (++j < size_ && grads_[j].row == row) {
    }
    return j;
  }
  // The first gradient of `row` or of a row after it.
  int64_t Find(int64_t row) const;

  // Whether some row has several gradients.
  bool repeat() const { return repeat_; }

 private:
  int64_t size_ = 0;
  std::unique_ptr<RowGrad[]> grads_;
  bool repeat_ = false;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_SPARSE_ROWS_H_
