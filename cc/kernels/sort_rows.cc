#include "cc/kernels/sort_rows.h"

#include "cc/kernels/threads.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {

absl::Status SortRows(tensorflow::OpKernelContext* ctx,
                      const tensorflow::Tensor& indices, int i,
                      const CheckedVariables& variables, int variable,
                      SparseRows* sorted) {
  const IntraOpThreads threads(ctx);
  const int64_t count = indices.NumElements();
  const int64_t rows = variables.known_shape(variable).dim_size(0);
  const std::string name = variables.Describe(variable);
  return indices.dtype() == tensorflow::DT_INT32
             ? SortRows(threads, indices.flat<int32_t>().data(), count, i, rows,
                        name, sorted)
             : SortRows(threads, indices.flat<int64_t>().data(), count, i, rows,
                        name, sorted);
}

}  // namespace wrapopt
