#include "cc/xla/inputs.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cc/xla/custom_call.h"
#include "tensorflow/compiler/tf2xla/type_util.h"
#include "xla/hlo/builder/lib/constants.h"
#include "xla/hlo/builder/lib/slicing.h"
#include "xla/shape.h"

namespace wrapopt {

using tensorflow::Tensor;
using tensorflow::XlaOpKernelContext;
using xla::XlaOp;

namespace {

// Scalars of one type as a vector.
XlaOp Vector(xla::XlaBuilder* builder, std::vector<XlaOp> scalars) {
  for (XlaOp& scalar : scalars) scalar = xla::Reshape(scalar, {1});
  return xla::ConcatInDim(builder, scalars, 0);
}

}  // namespace

xla::PrimitiveType XlaType(tensorflow::DataType dtype) {
  xla::PrimitiveType type = xla::PRIMITIVE_TYPE_INVALID;
  tensorflow::DataTypeToPrimitiveType(dtype, &type).IgnoreError();
  return type;
}

std::optional<Tensor> Constant(XlaOpKernelContext* ctx, const char* name) {
  return ctx->InputExpression(name).constant_value();
}

XlaOp Scalar(XlaOpKernelContext* ctx, xla::PrimitiveType type, double value) {
  return xla::ConstantR0WithType(ctx->builder(), type, value);
}

XlaOp Element(XlaOp vector, int64_t i) {
  return xla::Reshape(xla::SliceInDim(vector, i, i + 1, 1, 0), {});
}

absl::Status ReadInputs(XlaOpKernelContext* ctx, const char* list,
                        Inputs* inputs) {
  return ctx->InputList(list, &inputs->ops, &inputs->shapes);
}

absl::Status CheckStatic(const char* list, int position, XlaOp tensor,
                         int first_dimension) {
  TF_ASSIGN_OR_RETURN(const xla::Shape shape,
                      tensor.builder()->GetShape(tensor));
  for (int d = first_dimension; d < shape.dimensions_size(); ++d) {
    if (!shape.is_dynamic_dimension(d)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        list, "[", position, "] must have a shape that is known at compile ",
        "time, got ", shape.ToString(),
        ": compute it outside of the compiled function"));
  }
  return absl::OkStatus();
}

XlaOp Padded(XlaOp array) {
  const bool dynamic =
      array.builder()->GetShape(array).value().is_dynamic_dimension(0);
  return dynamic ? xla::RemoveDynamicDimension(array, 0) : array;
}

XlaOp Counts(xla::XlaBuilder* builder, const std::vector<XlaOp>& indices) {
  std::vector<XlaOp> counts;
  for (const XlaOp of_variable : indices) {
    counts.push_back(xla::ConvertElementType(
        xla::GetDimensionSize(of_variable, 0), xla::S64));
  }
  return counts.empty() ? xla::ConstantR1<int64_t>(builder, {})
                        : Vector(builder, counts);
}

std::string Names(const XlaVariables& variables, int first, int count) {
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) {
    names.push_back(variables.Describe(first + i));
  }
  return Quoted(absl::StrJoin(names, std::string(1, '\0')));
}

}  // namespace wrapopt
