// The rules that the inputs of the ops must meet, and the errors of inputs that
// break them: here those of several ops, in <op>.h those of one.
//
// Each rule is written once. The kernels of all back ends apply it when an op
// runs. The op's shape function applies it to what is known while a graph is
// built. A shape or dtype that is not known breaks no rule.
#ifndef WRAPOPT_CC_OPS_CONTRACTS_H_
#define WRAPOPT_CC_OPS_CONTRACTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {

// "subject misshapen: got [3] but expected [4] (the shape of x)".
absl::Status Misshapen(absl::string_view subject,
                       const tensorflow::PartialTensorShape& got,
                       absl::string_view expected, absl::string_view why);

absl::Status CheckShape(absl::string_view subject,
                        const tensorflow::PartialTensorShape& got,
                        const tensorflow::PartialTensorShape& expected,
                        absl::string_view why);

absl::Status CheckScalar(absl::string_view name,
                         const tensorflow::PartialTensorShape& shape);

// Checks indices[i], the rows of a variable.
absl::Status CheckIndices(int i, const tensorflow::PartialTensorShape& shape);

// Whether gradients, shadows or sources of a variable of dtype `dtype` may have
// dtype `other`: the same, or float for half and bfloat16.
bool FitsLowPrecision(tensorflow::DataType other, tensorflow::DataType dtype);

// ", or float" if gradients, shadows or sources of a variable of `dtype` may be
// float, too.
std::string OrFloat(tensorflow::DataType dtype);

inline bool IsKnown(tensorflow::DataType dtype) {
  return dtype != tensorflow::DT_INVALID;
}

// The shape of a vector of `size` elements, -1 if that is not known.
inline tensorflow::PartialTensorShape Vector(int64_t size) {
  return tensorflow::PartialTensorShape({size});
}

// Some of an op's input "variables", which has several lists one after the
// other. A tensor of the input may hold the handles of several variables.
struct VariableList {
  absl::string_view name;
  int count;
  bool is_read = false;  // And not written.
  // The dtype of variables that need no value.
  tensorflow::DataType made_of = tensorflow::DT_INVALID;
};

// Checks the number of variables in the input "variables".
absl::Status CheckCount(const std::vector<VariableList>& lists, int64_t got);

// The facts about an op's variables that checks need. A variable is identified
// by its position in all lists of the op that were looked up.
class CheckedVariables {
 public:
  // "values[3]", and when the op runs, "values[3] (variable 'w')".
  virtual std::string Describe(int variable) const = 0;
  // DT_INVALID if it is not known.
  virtual tensorflow::DataType known_dtype(int variable) const = 0;
  virtual const tensorflow::PartialTensorShape& known_shape(
      int variable) const = 0;
  // For a variable that is read and may also be written: the position of the
  // written one, or -1.
  virtual int Written(int variable) const = 0;

  absl::Status CheckDtype(int variable, tensorflow::DataType dtype) const;
  absl::Status CheckShape(int variable,
                          const tensorflow::PartialTensorShape& expected,
                          absl::string_view why) const;
  // `variable` must have the shape of `like`.
  absl::Status CheckSameShape(int variable, int like) const;
  // The tensor `list[position]` must have the shape of `like`.
  absl::Status CheckSameShape(const tensorflow::PartialTensorShape& shape,
                              const char* list, int position, int like) const;
  absl::Status CheckHasRows(int variable) const;

  // Checks the dtype of `count` variables from `first` on, and counts their
  // elements: -1 if that is not known.
  absl::Status CountElements(int first, int count, tensorflow::DataType dtype,
                             int64_t* elements) const;

 protected:
  ~CheckedVariables() = default;

  absl::Status NotInitialized(int variable) const;
  // The error if two positions are one variable and at least one is written.
  absl::Status NamedTwice(int a, int b) const;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_OPS_CONTRACTS_H_
