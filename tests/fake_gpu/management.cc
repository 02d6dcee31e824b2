// The functions of libnvidia-ml.so.1 that TensorFlow calls to set up a GPU.
#include <cstdio>

#define API(result, name, ...) \
  extern "C" __attribute__((visibility("default"))) result name(__VA_ARGS__)

API(int, nvmlInit) { return 0; }
API(int, nvmlInit_v2) { return 0; }
API(int, nvmlInitWithFlags, unsigned) { return 0; }
API(int, nvmlShutdown) { return 0; }
API(const char*, nvmlErrorString, int) { return "of the fake GPU"; }
API(int, nvmlDeviceGetHandleByPciBusId_v2, const char*, void** device) {
  *device = nullptr;
  return 0;
}
API(int, nvmlSystemGetDriverVersion, char* version, unsigned size) {
  snprintf(version, size, "570.00");
  return 0;
}
