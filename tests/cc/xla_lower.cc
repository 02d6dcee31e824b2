// For tests: lowers a function, with its variables, to HLO for any device type
// that XLA supports, even if this machine does not have such a device.
//
// TensorFlow's experimental_get_compiler_ir needs the device.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "tensorflow/compiler/tf2xla/xla_compiler.h"
#include "tensorflow/compiler/tf2xla/xla_op_registry.h"
#include "tensorflow/compiler/tf2xla/xla_resource.h"
#include "tensorflow/core/framework/attr_value.pb.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/function.pb.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/tpu/tpu_defs.h"
#include "xla/client/client_library.h"
#include "xla/debug_options_flags.h"
#include "xla/hlo/analysis/alias_info.h"
#include "xla/hlo/ir/hlo_module.h"
#include "xla/service/copy_insertion.h"
#include "xla/stream_executor/platform_manager.h"

namespace {

namespace tf = tensorflow;

// TensorFlow knows these device types, but its wheels have no back end for TPU,
// nor that for CPU one for GPU, and so would make no kernel for them. To be
// registered before XLA first compiles something: then kernels are made.
const bool registered = [] {
  const auto add = [](const char* device,
                      absl::Span<const tf::DataType> types) {
    if (!tf::XlaOpRegistry::IsBackendRegistered(device)) {
      new tf::XlaBackendRegistrar(device, types);
    }
  };
  add(tf::DEVICE_GPU_XLA_JIT, tf::kGpuAllTypes);
  add("XLA_TPU_JIT", tf::kTpuAllTypes);
  return true;
}();

void Check(const absl::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}

template <class T>
T Value(absl::StatusOr<T> value) {
  Check(value.status());
  return *std::move(value);
}

// Whether it is a variable, its dtype and its shape.
using Argument = std::tuple<bool, int, std::vector<int64_t>>;

std::string Lower(const std::string& library, const std::string& function,
                  const std::vector<Argument>& arguments,
                  const std::string& device, bool ahead_of_time,
                  bool with_copies) {
  tf::FunctionDefLibrary functions;
  if (!functions.ParseFromString(library)) {
    throw std::runtime_error(
        "`library` must be a serialized FunctionDefLibrary");
  }
  const tf::FunctionLibraryDefinition definitions(tf::OpRegistry::Global(),
                                                  functions);
  tf::XlaCompiler::Options options;
  options.device_type = tf::DeviceType(device);
  // The host's will do: nothing is run.
  const auto host =
      Value(stream_executor::PlatformManager::PlatformWithName("Host"));
  if (ahead_of_time) {
    options.client =
        Value(xla::ClientLibrary::GetOrCreateCompileOnlyClient(host));
  } else {
    options.client = Value(xla::ClientLibrary::GetOrCreateLocalClient(host));
  }
  options.flib_def = &definitions;

  std::vector<tf::XlaCompiler::Argument> compiled;
  for (const auto& [is_variable, dtype, dimensions] : arguments) {
    tf::XlaCompiler::Argument argument;
    argument.type = static_cast<tf::DataType>(dtype);
    argument.shape = tf::TensorShape(dimensions);
    if (is_variable) {
      argument.kind = tf::XlaCompiler::Argument::kResource;
      argument.resource_kind = tf::XlaResource::kVariable;
      argument.initialized = true;
    } else {
      argument.kind = tf::XlaCompiler::Argument::kParameter;
    }
    compiled.push_back(std::move(argument));
  }

  tf::XlaCompiler::CompileOptions compile_options;
  compile_options.alias_resource_update = true;
  tf::NameAttrList name;
  name.set_name(function);
  tf::XlaCompiler::CompilationResult result;
  Check(tf::XlaCompiler(options).CompileFunction(compile_options, name,
                                                 compiled, &result));
  const xla::HloModuleProto& proto = result.computation->proto();
  const auto config = Value(xla::HloModule::CreateModuleConfigFromProto(
      proto, xla::GetDebugOptionsFromFlags()));
  const auto module = Value(xla::HloModule::CreateFromProto(proto, config));
  if (with_copies) {
    // XLA leaves out a reshape that changes nothing, instead of copying it.
    for (xla::HloInstruction* const each :
         module->entry_computation()->MakeInstructionPostOrder()) {
      if (each->opcode() == xla::HloOpcode::kReshape &&
          each->shape() == each->operand(0)->shape()) {
        Check(each->ReplaceAllUsesWith(each->mutable_operand(0)));
      }
    }
    const xla::AliasInfo aliases;
    Value(xla::CopyInsertion(&aliases).Run(module.get()));
  }
  return module->ToString();
}

}  // namespace

PYBIND11_MODULE(_xla_lower, m) {
  m.def("lower", &Lower, pybind11::arg("library"), pybind11::arg("function"),
        pybind11::arg("arguments"), pybind11::arg("device"),
        pybind11::arg("ahead_of_time"), pybind11::arg("with_copies"));
}
