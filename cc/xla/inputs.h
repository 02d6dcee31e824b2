// Functions by which XLA kernels read the inputs of their op.
//
// On a CPU, an op is a call of its CPU kernel. On other devices it is plain
// HLO, which does not check values known only at run time, such as a decay or
// an index that is not a constant. There, the formula is applied to a decay,
// rate or weight out of range, and an index out of range is ignored.
#ifndef WRAPOPT_CC_XLA_INPUTS_H_
#define WRAPOPT_CC_XLA_INPUTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/xla/variables.h"
#include "tensorflow/compiler/tf2xla/xla_op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "xla/hlo/builder/xla_builder.h"
#include "xla/xla_data.pb.h"

namespace wrapopt {

// The XLA type of a dtype that the ops' attributes allow.
xla::PrimitiveType XlaType(tensorflow::DataType dtype);

// The value of an input that is known when the computation is built.
std::optional<tensorflow::Tensor> Constant(tensorflow::XlaOpKernelContext* ctx,
                                           const char* name);

xla::XlaOp Scalar(tensorflow::XlaOpKernelContext* ctx, xla::PrimitiveType type,
                  double value);

// Element `i` of a vector.
xla::XlaOp Element(xla::XlaOp vector, int64_t i);

// An input list of rows of N tensors of one dtype. `shapes` has the bounds of a
// tensor of bounded dynamic shape.
struct Inputs {
  std::vector<xla::XlaOp> ops;
  std::vector<tensorflow::TensorShape> shapes;
};

absl::Status ReadInputs(tensorflow::XlaOpKernelContext* ctx, const char* list,
                        Inputs* inputs);

// A tensor that is combined with a whole variable must have a static shape.
absl::Status CheckStatic(const char* list, int position, xla::XlaOp tensor,
                         int first_dimension = 0);

// An array of dynamic size, padded to its bound.
xla::XlaOp Padded(xla::XlaOp array);

// The numbers of indices that count in each of several vectors, as int64.
xla::XlaOp Counts(xla::XlaBuilder* builder,
                  const std::vector<xla::XlaOp>& indices);

// The names of `count` variables in errors, separated by zero bytes.
std::string Names(const XlaVariables& variables, int first, int count);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_XLA_INPUTS_H_
