// NVIDIA's driver, which is loaded at run time: the library links nothing of it
// and also loads on a machine without it.
#ifndef WRAPOPT_CC_GPU_DRIVER_H_
#define WRAPOPT_CC_GPU_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace wrapopt {
namespace gpu {

using Result = int;  // CUresult; 0 is success.
using Device = int;
using Context = struct ContextTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;
using Stream = struct StreamTag*;
using Address = uint64_t;

struct Driver {
  Result (*Init)(unsigned flags);
  Result (*DriverGetVersion)(int* version);
  Result (*DeviceGetCount)(int* count);
  Result (*DeviceGet)(Device* device, int ordinal);
  Result (*DeviceGetName)(char* name, int size, Device device);
  Result (*DeviceGetAttribute)(int* value, int attribute, Device device);
  Result (*CtxGetCurrent)(Context* context);
  Result (*CtxGetDevice)(Device* device);
  Result (*ModuleLoadData)(Module* module, const void* image);
  Result (*ModuleGetFunction)(Function* function, Module module,
                              const char* name);
  Result (*LaunchKernel)(Function function, unsigned grid_x, unsigned grid_y,
                         unsigned grid_z, unsigned block_x, unsigned block_y,
                         unsigned block_z, unsigned shared_bytes, Stream stream,
                         void** arguments, void** extra);
  Result (*GetErrorString)(Result result, const char** text);

  // The missing library or function, or "". If not "", no function may be
  // called.
  std::string missing;
};

// The driver of this machine. The first call loads it.
const Driver& GetDriver();

// Attributes of a device.
inline constexpr int kMultiprocessors = 16;
inline constexpr int kComputeCapabilityMajor = 75;
inline constexpr int kComputeCapabilityMinor = 76;

struct DeviceInfo {
  std::string name;
  int compute_capability;  // 10 * major + minor.
  int multiprocessors;
  int driver;  // The CUDA version of the driver: 12040 is 12.4.
};

// These return the text of an error, or "".
std::string Describe(Device device, DeviceInfo* info);
// All GPUs of this machine.
std::string Describe(std::vector<DeviceInfo>* devices);

std::string ErrorText(const std::string& call, Result result);

}  // namespace gpu
}  // namespace wrapopt

#endif  // WRAPOPT_CC_GPU_DRIVER_H_
