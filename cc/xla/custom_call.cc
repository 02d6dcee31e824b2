#include "cc/xla/custom_call.h"

#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "tensorflow/compiler/tf2xla/xla_compiler.h"
#include "tensorflow/compiler/tf2xla/xla_op_registry.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/util/port.h"
#include "xla/client/compile_only_client.h"
#include "xla/hlo/builder/lib/constants.h"
#include "xla/layout_util.h"
#include "xla/shape.h"
#include "xla/shape_util.h"

namespace wrapopt {

using tensorflow::XlaOpKernelContext;
using xla::XlaBuilder;
using xla::XlaOp;

namespace {

// Reads an environment variable.
absl::Status ReadChoice(const char* name, bool otherwise, bool* calls) {
  const char* const value = std::getenv(name);
  const std::string chosen = value == nullptr ? "" : value;
  if (chosen != "" && chosen != "call" && chosen != "hlo") {
    return absl::InvalidArgumentError(absl::StrCat(
        name, " must be 'call' or 'hlo', got '", chosen, "'"));
  }
  *calls = chosen == "" ? otherwise : chosen == "call";
  return absl::OkStatus();
}

}  // namespace

absl::Status CallsKernels(XlaOpKernelContext* ctx, Calls* calls) {
  bool on_cpu, on_gpu;
  TF_RETURN_IF_ERROR(ReadChoice("WRAPOPT_XLA_ON_CPU", true, &on_cpu));
  TF_RETURN_IF_ERROR(ReadChoice("WRAPOPT_XLA_ON_GPU", false, &on_gpu));
  // A TensorFlow for AMD's GPUs calls them by the same name.
  on_gpu = on_gpu && !tensorflow::IsBuiltWithROCm();
  tensorflow::XlaCompiler* const compiler = ctx->compiler();
  const std::string& device = compiler->options().device_type.type_string();
  *calls = dynamic_cast<xla::CompileOnlyClient*>(compiler->client()) != nullptr
               ? Calls::kNone
           : on_cpu && device == tensorflow::DEVICE_CPU_XLA_JIT ? Calls::kCpu
           : on_gpu && device == tensorflow::DEVICE_GPU_XLA_JIT ? Calls::kGpu
                                                                : Calls::kNone;
  return absl::OkStatus();
}

XlaOp GpuNumbers(XlaOp scalars, XlaOp decays) {
  return xla::ConcatInDim(scalars.builder(),
                          {scalars, xla::ScalarLike(decays, 1.0) - decays}, 0);
}

void KernelCall::Write(int first, int count) {
  for (int variable = first; variable < first + count; ++variable) {
    written_.push_back({variable, static_cast<int>(operands_.size())});
    Read(variables_.value(variable));
  }
}

absl::Status KernelCall::Emit(XlaBuilder* builder, const std::string& name,
                              const std::string& attributes) {
  // The layout of TensorFlow's arrays. If XLA has chosen another layout for an
  // array that it computes, it converts the array.
  std::vector<xla::Shape> shapes;
  for (const XlaOp operand : operands_) {
    TF_ASSIGN_OR_RETURN(xla::Shape shape, builder->GetShape(operand));
    xla::LayoutUtil::SetToDefaultLayout(&shape);
    shapes.push_back(std::move(shape));
  }
  std::vector<xla::Shape> results;
  std::vector<std::pair<xla::ShapeIndex, std::pair<int64_t, xla::ShapeIndex>>>
      aliases;
  for (const Written& written : written_) {
    const int64_t result = results.size();
    aliases.emplace_back(xla::ShapeIndex({result}),
                         std::make_pair(int64_t{written.operand},
                                        xla::ShapeIndex()));
    results.push_back(shapes[written.operand]);
  }
  const XlaOp call = xla::CustomCallWithLayout(
      builder, name, operands_, xla::ShapeUtil::MakeTupleShape(results), shapes,
      attributes, /*has_side_effect=*/false, aliases, /*literal=*/nullptr,
      xla::CustomCallSchedule::SCHEDULE_NONE,
      xla::CustomCallApiVersion::API_VERSION_TYPED_FFI);
  for (size_t i = 0; i < written_.size(); ++i) {
    TF_RETURN_IF_ERROR(variables_.Assign(written_[i].variable,
                                         xla::GetTupleElement(call, i)));
  }
  return absl::OkStatus();
}

std::string Quoted(const std::string& text) {
  std::string quoted;
  for (const unsigned char c : text) {
    if (c < ' ' || c > '~' || c == '"' || c == '\\') {
      absl::StrAppendFormat(&quoted, "\\%02X", c);
    } else {
      quoted += c;
    }
  }
  return absl::StrCat("\"", quoted, "\"");
}

}  // namespace wrapopt
