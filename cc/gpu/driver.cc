#include "cc/gpu/driver.h"

#include <dlfcn.h>

#include "cc/old_glibc.h"

// The versions before 2.34, which moved them to another library.
WRAPOPT_OLD_GLIBC(dlopen, "2.2.5");
WRAPOPT_OLD_GLIBC(dlsym, "2.2.5");

namespace wrapopt {
namespace gpu {
namespace {

template <class Function>
void Find(void* library, const char* name, Function* function,
          Driver* driver) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr) {
    driver->missing = std::string(name) + " in libcuda.so.1";
  }
}

Driver* FindDriver() {
  auto* driver = new Driver();
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    driver->missing = "NVIDIA's driver, libcuda.so.1";
    return driver;
  }
  Find(library, "cuInit", &driver->Init, driver);
  Find(library, "cuDriverGetVersion", &driver->DriverGetVersion, driver);
  Find(library, "cuDeviceGetCount", &driver->DeviceGetCount, driver);
  Find(library, "cuDeviceGet", &driver->DeviceGet, driver);
  Find(library, "cuDeviceGetName", &driver->DeviceGetName, driver);
  Find(library, "cuDeviceGetAttribute", &driver->DeviceGetAttribute, driver);
  Find(library, "cuCtxGetCurrent", &driver->CtxGetCurrent, driver);
  Find(library, "cuCtxGetDevice", &driver->CtxGetDevice, driver);
  Find(library, "cuModuleLoadData", &driver->ModuleLoadData, driver);
  Find(library, "cuModuleGetFunction", &driver->ModuleGetFunction, driver);
  Find(library, "cuLaunchKernel", &driver->LaunchKernel, driver);
  Find(library, "cuGetErrorString", &driver->GetErrorString, driver);
  return driver;
}

}  // namespace

const Driver& GetDriver() {
  static const Driver* const driver = FindDriver();
  return *driver;
}

std::string ErrorText(const std::string& call, Result result) {
  const char* text = nullptr;
  GetDriver().GetErrorString(result, &text);
  return call + ": " + (text == nullptr ? "unknown error" : text) + " (" +
         std::to_string(result) + ")";
}

std::string Describe(Device device, DeviceInfo* info) {
  const Driver& driver = GetDriver();
  char name[256] = "";
  int major = 0, minor = 0;
  Result result = driver.DeviceGetName(name, sizeof(name), device);
  if (result != 0) return ErrorText("cuDeviceGetName", result);
  info->name = name;
  result = driver.DeviceGetAttribute(&major, kComputeCapabilityMajor, device);
  if (result == 0) {
    result = driver.DeviceGetAttribute(&minor, kComputeCapabilityMinor, device);
  }
  if (result == 0) {
    result = driver.DeviceGetAttribute(&info->multiprocessors,
                                       kMultiprocessors, device);
  }
  if (result != 0) return ErrorText("cuDeviceGetAttribute", result);
  info->compute_capability = 10 * major + minor;
  result = driver.DriverGetVersion(&info->driver);
  if (result != 0) return ErrorText("cuDriverGetVersion", result);
  return "";
}

std::string Describe(std::vector<DeviceInfo>* devices) {
  const Driver& driver = GetDriver();
  if (!driver.missing.empty()) return "there is no " + driver.missing;
  Result result = driver.Init(0);
  if (result != 0) return ErrorText("cuInit", result);
  int count;
  result = driver.DeviceGetCount(&count);
  if (result != 0) return ErrorText("cuDeviceGetCount", result);
  devices->resize(count);
  for (int i = 0; i < count; ++i) {
    Device device;
    result = driver.DeviceGet(&device, i);
    if (result != 0) return ErrorText("cuDeviceGet", result);
    const std::string error = Describe(device, &(*devices)[i]);
    if (!error.empty()) return error;
  }
  return "";
}

}  // namespace gpu
}  // namespace wrapopt
