// How an XLA program for the CPU calls a kernel of cc/kernels/calls.h.
#ifndef WRAPOPT_CC_KERNELS_CALLS_XLA_H_
#define WRAPOPT_CC_KERNELS_CALLS_XLA_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/kernels/variables_xla.h"
#include "tensorflow/compiler/tf2xla/xla_op_kernel.h"
#include "xla/hlo/builder/xla_builder.h"
#include "xla/xla_data.pb.h"

namespace wrapopt {

// Whether the program that is built calls the CPU's kernels: where it runs in
// this process, on a CPU. What is compiled ahead of time for another process is
// HLO only, as is what is for another device.
//
// The environment variable WRAPOPT_XLA_ON_CPU may be "call", the default, or
// "hlo", which has a program for the CPU be as one for another device. It is read
// whenever an op is compiled.
absl::Status CallsKernels(tensorflow::XlaOpKernelContext* ctx, bool* calls);

// One call, whose operands are added in their order.
class KernelCall {
 public:
  explicit KernelCall(XlaVariables* variables) : variables_(*variables) {}

  void Read(xla::XlaOp operand) { operands_.push_back(operand); }
  // Variables, which the call writes in place.
  void Write(int first, int count);

  // Adds the call to the program and assigns its results. `attributes` are as
  // in an MLIR dictionary: {rule = "Adam"}.
  absl::Status Emit(xla::XlaBuilder* builder, const std::string& name,
                    const std::string& attributes = "{}");

 private:
  XlaVariables& variables_;
  std::vector<xla::XlaOp> operands_;
  struct Written {
    int variable;
    int operand;
  };
  std::vector<Written> written_;
};

// A string as in an MLIR dictionary.
std::string Quoted(const std::string& text);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_CALLS_XLA_H_
