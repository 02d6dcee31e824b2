// How an XLA program for the CPU calls a function of cc/xla/ffi_handlers.h.
#ifndef WRAPOPT_CC_XLA_CUSTOM_CALL_H_
#define WRAPOPT_CC_XLA_CUSTOM_CALL_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/xla/variables.h"
#include "tensorflow/compiler/tf2xla/xla_op_kernel.h"
#include "xla/hlo/builder/xla_builder.h"
#include "xla/xla_data.pb.h"

namespace wrapopt {

// Whether the program that is built calls the CPU's kernels. It does if it will
// run in this process, on a CPU. A program for another device, or one that is
// compiled ahead of time for another process, is HLO only.
//
// If the environment variable WRAPOPT_XLA_ON_CPU is "hlo", a program for the
// CPU is HLO only, too. The default is "call". The variable is read whenever an
// op is compiled.
absl::Status CallsKernels(tensorflow::XlaOpKernelContext* ctx, bool* calls);

// One call. Its operands are added in the order of cc/xla/ffi_handlers.h.
class KernelCall {
 public:
  explicit KernelCall(XlaVariables* variables) : variables_(*variables) {}

  void Read(xla::XlaOp operand) { operands_.push_back(operand); }
  // Adds variables that the call writes in place.
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

#endif  // WRAPOPT_CC_XLA_CUSTOM_CALL_H_
