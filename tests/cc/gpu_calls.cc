// For tests: calls a handler for XLA programs on an NVIDIA GPU, as XLA does,
// but with the arrays and the stream of any driver.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "xla/ffi/api/ffi.h"

namespace xla::ffi {
// Declared in xla/ffi/ffi_api.h, which includes headers that are not in the
// wheel.
struct HandlerRegistration {
  XLA_FFI_Metadata metadata;
  XLA_FFI_Handler_Bundle bundle;
};
absl::StatusOr<HandlerRegistration> FindHandler(absl::string_view name,
                                                absl::string_view platform);
const XLA_FFI_Api* GetXlaFfiApi();
}  // namespace xla::ffi

namespace {

namespace ffi = xla::ffi;

// Device address, type of XLA, and shape.
using Array = std::tuple<uint64_t, int, std::vector<int64_t>>;

thread_local void* stream_of_call;

ffi::HandlerRegistration Find(const std::string& name) {
  const auto found = ffi::FindHandler(name, "CUDA");
  if (!found.ok()) throw std::runtime_error(found.status().ToString());
  return *found;
}

// The operands or the results of a call.
struct Buffers {
  explicit Buffers(std::vector<Array>* arrays) {
    for (auto& [address, type, shape] : *arrays) {
      buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr,
                         static_cast<XLA_FFI_DataType>(type),
                         reinterpret_cast<void*>(address),
                         static_cast<int64_t>(shape.size()), shape.data()});
    }
    for (XLA_FFI_Buffer& buffer : buffers) pointers.push_back(&buffer);
  }

  int64_t size() const { return buffers.size(); }

  std::vector<XLA_FFI_Buffer> buffers;
  std::vector<void*> pointers;
};

// Returns the text of an error, or "".
std::string Call(const std::string& name, bool initialize,
                 std::vector<Array> operands, std::vector<Array> results,
                 const std::string& rule, uint64_t stream) {
  XLA_FFI_Api api = *ffi::GetXlaFfiApi();
  stream_of_call = reinterpret_cast<void*>(stream);
  api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) {
    args->stream = stream_of_call;
    return static_cast<XLA_FFI_Error*>(nullptr);
  };

  Buffers args(&operands), rets(&results);
  std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);
  XLA_FFI_AttrType attribute_type = XLA_FFI_AttrType_STRING;
  XLA_FFI_ByteSpan attribute_name = {"rule", 4};
  XLA_FFI_ByteSpan attribute = {rule.data(), rule.size()};
  XLA_FFI_ByteSpan* names[] = {&attribute_name};
  void* attributes[] = {&attribute};
  XLA_FFI_CallFrame frame = {
      XLA_FFI_CallFrame_STRUCT_SIZE, nullptr, &api, /*ctx=*/nullptr,
      initialize ? XLA_FFI_ExecutionStage_INITIALIZE
                 : XLA_FFI_ExecutionStage_EXECUTE,
      {XLA_FFI_Args_STRUCT_SIZE, nullptr, args.size(), arg_types.data(),
       args.pointers.data()},
      {XLA_FFI_Rets_STRUCT_SIZE, nullptr, rets.size(), ret_types.data(),
       rets.pointers.data()},
      {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, 1, &attribute_type, names,
       attributes},
      /*future=*/nullptr};
  const XLA_FFI_Handler_Bundle bundle = Find(name).bundle;
  XLA_FFI_Error* const error =
      (initialize ? bundle.initialize : bundle.execute)(&frame);
  if (error == nullptr) return "";
  const std::string text = ffi::internal::GetErrorMessage(&api, error);
  ffi::internal::DestroyError(&api, error);
  return text;
}

}  // namespace

PYBIND11_MODULE(_gpu_calls, m) {
  m.def("call", &Call);
  m.def("may_be_captured", [](const std::string& name) {
    return (Find(name).metadata.traits &
            XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE) != 0;
  });
}
