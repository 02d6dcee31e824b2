// Memory, a stream and graphs of a GPU, for the programs in this folder. They
// need a driver and a GPU, or the tests' fake GPU.
#ifndef WRAPOPT_CC_GPU_CHECK_DEVICE_H_
#define WRAPOPT_CC_GPU_CHECK_DEVICE_H_

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <random>
#include <string>
#include <vector>

#include "cc/gpu/driver.h"
#include "cc/gpu/launcher.h"
#include "cc/rules/rules.h"

namespace wrapopt {
namespace gpu {

[[noreturn]] void Fail(const std::string& what);

// Calls a function of the driver that the launcher does not use.
template <class... Arguments>
void Call(const char* name, Arguments... arguments) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  using Function = Result (*)(Arguments...);
  const auto function =
      library == nullptr
          ? nullptr
          : reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) Fail(std::string("no ") + name + " in libcuda.so.1");
  const Result result = function(arguments...);
  if (result != 0) Fail(ErrorText(name, result));
}

// Memory of the device.
class Array {
 public:
  explicit Array(size_t bytes) {
    Call("cuMemAlloc_v2", &address_, std::max<size_t>(bytes, 1));
  }
  ~Array() { Call("cuMemFree_v2", address_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  Address address() const { return address_; }

 private:
  Address address_ = 0;
};

extern Stream stream;

// Generates random sizes and numbers.
extern std::mt19937 generator;

// Makes the stream, and prints the GPU.
void Start();

void Wait();

template <class Launch>
void Run(const Launch& launch) {
  const std::string error = Enqueue(launch, stream);
  if (!error.empty()) Fail(error);
}

// The launches of an update as a CUDA graph. Its kernels must have been loaded.
class Graph {
 public:
  explicit Graph(const Update& update) {
    constexpr int kGlobal = 0;  // No other call is allowed during the capture.
    Call("cuStreamBeginCapture_v2", stream, kGlobal);
    ::wrapopt::gpu::Run(update);
    Call("cuStreamEndCapture", stream, &graph_);
  }
  ~Graph() { Call("cuGraphDestroy", graph_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  size_t launches() const {
    size_t count;
    Call("cuGraphGetNodes", graph_, static_cast<void*>(nullptr), &count);
    return count;
  }

 private:
  void* graph_;
};

size_t FreeMemory();

const char* NameOf(Number number);

// Different scalars; 1 for a flag.
std::vector<double> ScalarsOf(const RuleInfo& rule);

}  // namespace gpu
}  // namespace wrapopt

#endif  // WRAPOPT_CC_GPU_CHECK_DEVICE_H_
