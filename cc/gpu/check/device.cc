#include "cc/gpu/check/device.h"

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

namespace wrapopt {
namespace gpu {

void Fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(2);
}

Stream stream;

std::mt19937 generator(1);

void Start() {
  std::vector<DeviceInfo> devices;
  const std::string error = Describe(&devices);
  if (!error.empty()) Fail(error);
  if (devices.empty()) Fail("there is no GPU");
  const DeviceInfo& info = devices[0];
  std::printf("%s, compute capability %d.%d, driver for CUDA %d.%d\n",
              info.name.c_str(), info.compute_capability / 10,
              info.compute_capability % 10, info.driver / 1000,
              info.driver % 1000 / 10);
  Device device;
  Context context;
  Call("cuDeviceGet", &device, 0);
  Call("cuDevicePrimaryCtxRetain", &context, device);
  Call("cuCtxSetCurrent", context);
  constexpr unsigned kNonBlocking = 1;
  Call("cuStreamCreate", &stream, kNonBlocking);
}

void Wait() { Call("cuStreamSynchronize", stream); }

size_t FreeMemory() {
  size_t free, total;
  Call("cuMemGetInfo_v2", &free, &total);
  return free;
}

const char* NameOf(Number number) {
  switch (number) {
    case Number::kHalf:
      return "half";
    case Number::kBfloat16:
      return "bfloat16";
    case Number::kFloat:
      return "float";
    case Number::kDouble:
      return "double";
  }
  return "";
}

std::vector<double> ScalarsOf(const RuleInfo& rule) {
  std::vector<double> scalars;
  std::istringstream names{std::string(rule.scalars)};
  for (std::string name; names >> name;) {
    scalars.push_back(name.back() == '?' ? 1 : 0.4 + 0.07 * scalars.size());
  }
  return scalars;
}

}  // namespace gpu
}  // namespace wrapopt
