// How an XLA program calls a function of cc/xla/ffi_handlers.h.
#ifndef WRAPOPT_CC_XLA_CUSTOM_CALL_H_
#define WRAPOPT_CC_XLA_CUSTOM_CALL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/xla/variables.h"
#include "tensorflow/compiler/tf2xla/xla_op_kernel.h"
#include "xla/hlo/builder/xla_builder.h"
#include "xla/xla_data.pb.h"

namespace wrapopt {

// Whose kernels the program that is built calls. A program may call kernels if
// it will run in this process, on a CPU or an NVIDIA GPU. A program for another
// device, or one that is compiled ahead of time for another process, is HLO
// only.
//
// The environment variables WRAPOPT_XLA_ON_CPU and WRAPOPT_XLA_ON_GPU choose:
// "call" or "hlo". The default is "call" on a CPU and "hlo" on a GPU. The
// variables are read whenever an op is compiled.
enum class Calls { kNone, kCpu, kGpu };
absl::Status CallsKernels(tensorflow::XlaOpKernelContext* ctx, Calls* calls);

// Variables of more elements are HLO on a GPU, even if the others are a call.
// One loop of HLO saves a small variable nothing: its time is that of a launch.
// But a large one's loop may compute the gradient, too, which a call must find
// in memory. The number is a guess, and must be measured on a GPU.
constexpr int64_t kMostElementsOfGpuCall = int64_t{1} << 22;

// The operand `numbers` of a call on a GPU.
xla::XlaOp GpuNumbers(xla::XlaOp scalars, xla::XlaOp decays);

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
