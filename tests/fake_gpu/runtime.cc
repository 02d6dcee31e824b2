// The functions of libcudart.so.12 that TensorFlow calls to set up a GPU.
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define API(result, name, ...) \
  extern "C" __attribute__((visibility("default"))) result name(__VA_ARGS__)
#define NOTHING(name, ...) API(int, name, ##__VA_ARGS__) { return 0; }

namespace {

// Of the driver beside this library.
template <class Function>
Function Driver(const char* name) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  return reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

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
API(int, cudaGetDeviceProperties_v2, void* properties, int) {
  // Where CUDA 12 has them.
  constexpr size_t kSize = 1032, kWarpSize = 308, kThreadsPerBlock = 320,
                   kMultiprocessors = 388, kThreadsPerMultiprocessor = 624;
  char* const bytes = static_cast<char*>(properties);
  memset(bytes, 0, kSize);
  const auto set = [bytes](size_t at, int value) {
    memcpy(bytes + at, &value, sizeof(value));
  };
  set(kWarpSize, 32);
  set(kThreadsPerBlock, 1024);
  set(kMultiprocessors, 132);
  set(kThreadsPerMultiprocessor, 2048);
  return 0;
}
API(int, cudaMemcpyAsync, void* to, const void* from, size_t size, int kind,
    void*) {
  const auto device_to = reinterpret_cast<uint64_t>(to);
  const auto device_from = reinterpret_cast<uint64_t>(from);
  switch (kind) {
    case 1:
      return Driver<int (*)(uint64_t, const void*, size_t)>("cuMemcpyHtoD_v2")(
          device_to, from, size);
    case 2:
      return Driver<int (*)(void*, uint64_t, size_t)>("cuMemcpyDtoH_v2")(
          to, device_from, size);
    default:
      return Driver<int (*)(uint64_t, uint64_t, size_t)>("cuMemcpyDtoD_v2")(
          device_to, device_from, size);
  }
}
API(int, cudaMemsetAsync, void* to, int value, size_t size, void*) {
  return Driver<int (*)(uint64_t, unsigned char, size_t)>("cuMemsetD8_v2")(
      reinterpret_cast<uint64_t>(to), static_cast<unsigned char>(value), size);
}
// Of TensorFlow's kernels none is there. A caller may take no notice of an
// error, so that nothing less than an end will do; but for a kernel of Eigen's,
// which has its number of elements as second argument, over an empty tensor.
struct Dimensions {
  unsigned x, y, z;
};
API(int, cudaLaunchKernel, const void*, Dimensions, Dimensions,
    void** arguments, size_t, void*) {
  if (*static_cast<const int*>(arguments[1]) == 0) return 0;
  fprintf(stderr, "The fake GPU has no kernels of TensorFlow's.\n");
  abort();
}
// Without these two, the call above is left out.
NOTHING(__cudaPushCallConfiguration)
NOTHING(__cudaPopCallConfiguration)
