// The resource variables that an op reads and writes in an XLA computation.
//
// A kernel takes the same steps as with `Variables`, without locks: Find(list,
// access) for each input list, checks, then value() and Assign().
#ifndef WRAPOPT_CC_XLA_VARIABLES_H_
#define WRAPOPT_CC_XLA_VARIABLES_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cc/ops/contracts.h"
#include "tensorflow/compiler/tf2xla/xla_op_kernel.h"
#include "tensorflow/compiler/tf2xla/xla_resource.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "xla/hlo/builder/xla_builder.h"
#include "xla/xla_data.pb.h"

namespace wrapopt {

class XlaVariables final : public CheckedVariables {
 public:
  // As in `Variables`.
  enum class Access { kRead, kReadWritten, kWrite };

  explicit XlaVariables(tensorflow::XlaOpKernelContext* ctx) : ctx_(ctx) {}

  // Finds the variables of one input list and reads them. Their positions in
  // all calls of this class are `first(list)` + position in the list. Find
  // lists that are written before those that are only read.
  absl::Status Find(const char* list, Access access, int* first);

  // The same for variables that may have no value: they become zeros of the
  // shape in the call of SetShape().
  absl::Status FindOrMake(const char* list, tensorflow::DataType dtype,
                          int* first);

  // Finds the variables of the input "variables", in its order.
  absl::Status Find(const std::vector<VariableList>& lists);

  void SetShape(int variable, const tensorflow::TensorShape& shape);

  std::string Describe(int variable) const override;
  tensorflow::DataType known_dtype(int variable) const override {
    const Entry& entry = entries_[variable];
    return entry.resource->initialized() ? entry.resource->type()
                                         : *entry.made_of;
  }
  const tensorflow::PartialTensorShape& known_shape(
      int variable) const override {
    static const auto& unknown = *new tensorflow::PartialTensorShape;
    if (!entries_[variable].resource->initialized()) return unknown;
    return shape(variable);
  }
  tensorflow::DataType dtype(int variable) const {
    return known_dtype(variable);
  }
  const tensorflow::TensorShape& shape(int variable) const {
    return entries_[variable].resource->shape();
  }
  int Written(int variable) const override {
    return entries_[variable].written;
  }

  // The dtype as a type of XLA.
  xla::PrimitiveType type(int variable) const;

  // The value of a variable before the op.
  xla::XlaOp value(int variable) const { return entries_[variable].value; }

  absl::Status Assign(int variable, xla::XlaOp value);

  // The value of a variable after the op.
  xla::XlaOp assigned(int variable) const {
    return entries_[variable].resource->value();
  }

 private:
  struct Entry {
    absl::string_view list;
    int position;
    int input;
    tensorflow::XlaResource* resource = nullptr;
    xla::XlaOp value;
    int written = -1;
    std::optional<tensorflow::DataType> made_of;  // For FindOrMake.
  };

  absl::Status Find(const char* list, Access access,
                    std::optional<tensorflow::DataType> made_of, int* first);
  // Finds the variable of one input, which is at this place of a list.
  absl::Status FindOne(absl::string_view list, int position, int input,
                       Access access,
                       std::optional<tensorflow::DataType> made_of);

  tensorflow::XlaOpKernelContext* const ctx_;
  std::vector<Entry> entries_;
  // The entry of each variable that is written.
  absl::flat_hash_map<const tensorflow::XlaResource*, int> written_;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_XLA_VARIABLES_H_
