// What TensorFlow calls of libcudart.so.12 to set a GPU up.
#include <cstring>

#define API(result, name, ...) \
  extern "C" __attribute__((visibility("default"))) result name(__VA_ARGS__)
#define NOTHING(name, ...) API(int, name, ##__VA_ARGS__) { return 0; }

NOTHING(cudaSetDevice, int)
NOTHING(cudaSetDeviceFlags, unsigned)
NOTHING(cudaFree, void*)
NOTHING(cudaGetLastError)
NOTHING(cudaPeekAtLastError)

API(int, cudaGetDevice, int* device) {
  *device = 0;
  return 0;
}
API(int, cudaGetDeviceCount, int* count) {
  *count = 1;
  return 0;
}
API(int, cudaRuntimeGetVersion, int* version) {
  *version = 12050;
  return 0;
}
API(int, cudaDriverGetVersion, int* version) {
  *version = 12080;
  return 0;
}
API(const char*, cudaGetErrorString, int) { return "of the fake GPU"; }
API(const char*, cudaGetErrorName, int) { return "of the fake GPU"; }
API(int, cudaDeviceGetAttribute, int* value, int, int) {
  *value = 0;
  return 0;
}
