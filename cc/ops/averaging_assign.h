#ifndef WRAPOPT_CC_OPS_AVERAGING_ASSIGN_H_
#define WRAPOPT_CC_OPS_AVERAGING_ASSIGN_H_

#include <string>

#include "absl/status/status.h"
#include "cc/ops/contracts.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {

class AveragingAssignContract {
 public:
  // Reads the attributes N and T and those that tell the lengths of the lists.
  template <class Context>
  absl::Status Init(Context* ctx);

  // Checks the input "rate".
  absl::Status CheckRate(double rate) const;
  // Checks the shape of the input "weights", and its value if that is known.
  absl::Status CheckWeights(const tensorflow::PartialTensorShape& shape,
                            const tensorflow::Tensor* value = nullptr) const;

  // Checks dtypes and shapes, and that a target is a source only of its own
  // mean.
  absl::Status CheckVariables(const CheckedVariables& variables, int targets,
                              int sources) const;
  absl::Status CheckTensor(const CheckedVariables& variables, int targets,
                           int position, tensorflow::DataType dtype,
                           tensorflow::DataType first_of_row,
                           const tensorflow::PartialTensorShape& shape) const;

  int variables() const { return n_; }
  // The numbers for each variable.
  int targets() const { return targets_; }
  int sources() const { return sources_; }
  int tensors() const { return tensors_; }
  // The dtype of the sums.
  tensorflow::DataType sum_dtype() const {
    return dtype_ == tensorflow::DT_DOUBLE ? tensorflow::DT_DOUBLE
                                           : tensorflow::DT_FLOAT;
  }

 private:
  // Counts the rows of N in an input list of `count`.
  absl::Status CountRows(const char* list, int count, int* rows) const;
  // A dtype must be the op's, or float if the op's is half or bfloat16, and the
  // dtype of the first of its row.
  bool FitsRow(tensorflow::DataType got, tensorflow::DataType first) const;
  absl::Status DtypeError(const std::string& subject, tensorflow::DataType got,
                          const std::string& first_subject,
                          tensorflow::DataType first) const;
  absl::Status CheckVariable(const CheckedVariables& variables, int targets,
                             int first, int variable) const;

  int n_;
  int targets_, sources_, tensors_;
  tensorflow::DataType dtype_;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_OPS_AVERAGING_ASSIGN_H_
