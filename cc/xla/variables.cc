#include "cc/xla/variables.h"

#include "absl/strings/str_cat.h"
#include "tensorflow/compiler/tf2xla/type_util.h"
#include "tensorflow/core/platform/errors.h"
#include "xla/hlo/builder/lib/constants.h"

namespace wrapopt {

using tensorflow::XlaResource;

absl::Status XlaVariables::Find(const char* list, Access access, int* first) {
  return Find(list, access, std::nullopt, first);
}

absl::Status XlaVariables::FindOrMake(const char* list,
                                      tensorflow::DataType dtype, int* first) {
  return Find(list, Access::kWrite, dtype, first);
}

void XlaVariables::SetShape(int variable,
                            const tensorflow::TensorShape& shape) {
  Entry& entry = entries_[variable];
  if (entry.resource->initialized()) return;
  entry.value = xla::Broadcast(xla::Zero(ctx_->builder(), type(variable)),
                               shape.dim_sizes());
}

absl::Status XlaVariables::Find(const char* list, Access access,
                                std::optional<tensorflow::DataType> made_of,
                                int* first) {
  int start, stop;
  TF_RETURN_IF_ERROR(ctx_->op_kernel().InputRange(list, &start, &stop));
  *first = entries_.size();
  for (int input = start; input < stop; ++input) {
    TF_RETURN_IF_ERROR(FindOne(list, input - start, input, access, made_of));
  }
  return absl::OkStatus();
}

absl::Status XlaVariables::Find(const std::vector<VariableList>& lists) {
  int input, stop;
  TF_RETURN_IF_ERROR(
      ctx_->op_kernel().InputRange("variables", &input, &stop));
  TF_RETURN_IF_ERROR(CheckCount(lists, stop - input));
  for (const VariableList& list : lists) {
    std::optional<tensorflow::DataType> made_of;
    if (list.made_of != tensorflow::DT_INVALID) made_of = list.made_of;
    for (int i = 0; i < list.count; ++i, ++input) {
      TF_RETURN_IF_ERROR(FindOne(
          list.name, i, input, list.is_read ? Access::kRead : Access::kWrite,
          made_of));
    }
  }
  return absl::OkStatus();
}

absl::Status XlaVariables::FindOne(
    absl::string_view list, int position, int input, Access access,
    std::optional<tensorflow::DataType> made_of) {
  const int variable = entries_.size();
  entries_.push_back({list, position, input});
  Entry& entry = entries_.back();
  TF_RETURN_IF_ERROR(ctx_->GetResourceInput(input, &entry.resource));
  if (entry.resource->kind() != XlaResource::kVariable) {
    return absl::InvalidArgumentError(absl::StrCat(
        Describe(variable), " is not a variable, but a ",
        XlaResource::KindToString(entry.resource->kind())));
  }
  entry.made_of = made_of;
  const bool has_value = entry.resource->initialized();
  if (!has_value && !made_of) return NotInitialized(variable);
  if (made_of) TF_RETURN_IF_ERROR(CheckDtype(variable, *made_of));

  const auto written = written_.find(entry.resource);
  if (written != written_.end()) {
    if (access != Access::kReadWritten) {
      return NamedTwice(written->second, variable);
    }
    entry.written = written->second;
  } else if (access == Access::kWrite) {
    written_[entry.resource] = variable;
  }
  if (!has_value) return absl::OkStatus();
  return ctx_->ReadVariableInput(input, dtype(variable), /*shape=*/nullptr,
                                 &entry.value);
}

std::string XlaVariables::Describe(int variable) const {
  const Entry& entry = entries_[variable];
  return absl::StrCat(entry.list, "[", entry.position, "] (variable '",
                      entry.resource->name(), "')");
}

xla::PrimitiveType XlaVariables::type(int variable) const {
  xla::PrimitiveType type = xla::PRIMITIVE_TYPE_INVALID;
  // Succeeds, since a variable that was read has a type of XLA.
  tensorflow::DataTypeToPrimitiveType(dtype(variable), &type).IgnoreError();
  return type;
}

absl::Status XlaVariables::Assign(int variable, xla::XlaOp value) {
  return ctx_->AssignVariable(entries_[variable].input, dtype(variable), value);
}

}  // namespace wrapopt
