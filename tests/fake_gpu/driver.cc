// An emulation of NVIDIA's driver, libcuda.so.1, for tests on a machine without
// a GPU. It has the parts that TensorFlow needs for a GPU:0 with memory, copies
// and wrapopt's kernels. TensorFlow's own kernels do not run on it.
//
// "Device memory" is a memory file that is mapped twice. Device addresses are
// those of the mapping that is not readable or writable, so host code that
// dereferences one crashes. Copies and kernels use the other mapping, and
// refuse addresses outside of device memory. A stream executes work at once.
//
// Environment variables:
//   WRAPOPT_FAKE_GPU_CC      compute capability, 10 * major + minor (90)
//   WRAPOPT_FAKE_GPU_DRIVER  the CUDA version of the driver (12080)
//   WRAPOPT_FAKE_GPU_MEMORY  GiB (1); only touched pages use real memory
//   WRAPOPT_FAKE_GPU_LOG     a file for a log of loaded images, launches,
//                            allocations, copies and fills
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cc/engine/subnormals.h"
#include "cc/gpu/table.h"
#include "cc/rules/rules.h"
#include "tests/fake_gpu/emulation.h"

namespace wrapopt {
namespace fake_gpu {

thread_local Index thread, block, grid;

namespace {

using gpu::Word;

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kOutOfMemory = 2;
constexpr int kInvalidImage = 200;
constexpr int kNotFound = 500;
constexpr int kIllegalAddress = 700;
constexpr int kStreamCaptureUnsupported = 900;
constexpr int kStreamCaptureInvalidated = 901;

int Setting(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value == nullptr ? otherwise : atoi(value);
}

size_t AllMemory() {
  static const size_t bytes =
      static_cast<size_t>(Setting("WRAPOPT_FAKE_GPU_MEMORY", 1)) << 30;
  return bytes;
}

template <class... Arguments>
void Log(const char* format, Arguments... arguments) {
  static FILE* const file = [] {
    const char* path = getenv("WRAPOPT_FAKE_GPU_LOG");
    return path == nullptr ? nullptr : fopen(path, "a");
  }();
  if (file == nullptr) return;
  fprintf(file, format, arguments...);
  fflush(file);
}

class Memory {
 public:
  static Memory& Get() {
    static auto* const memory = new Memory();
    return *memory;
  }

  int Allocate(size_t size, uint64_t* address) {
    Log("allocate %zu\n", size);
    const std::lock_guard<std::mutex> lock(mu_);
    size = (size + 511) / 512 * 512;
    if (size > AllMemory() - used()) return kOutOfMemory;
    *address = reinterpret_cast<uint64_t>(device_ + used());
    blocks_.push_back({used() + size, /*is_free=*/false});
    return kSuccess;
  }

  // What is freed is handed out again once all that came later is free, too.
  int Free(uint64_t address) {
    const std::lock_guard<std::mutex> lock(mu_);
    size_t begin = 0;
    for (Block& block : blocks_) {
      if (reinterpret_cast<uint64_t>(device_ + begin) == address) {
        block.is_free = true;
      }
      begin = block.end;
    }
    while (!blocks_.empty() && blocks_.back().is_free) blocks_.pop_back();
    return kSuccess;
  }

  // Where the host finds it; nullptr for what is not in device memory.
  char* Host(uint64_t address, size_t size) {
    const uint64_t begin = reinterpret_cast<uint64_t>(device_);
    if (address < begin || address - begin + size > AllMemory()) {
      Log("%p is not in device memory\n", reinterpret_cast<void*>(address));
      return nullptr;
    }
    return host_ + (address - begin);
  }

 private:
  Memory() {
    const int file = memfd_create("wrapopt_fake_gpu", 0);
    if (file < 0 || ftruncate(file, AllMemory()) != 0) abort();
    device_ = Map(file, PROT_NONE);
    host_ = Map(file, PROT_READ | PROT_WRITE);
  }

  static char* Map(int file, int protection) {
    void* mapping = mmap(nullptr, AllMemory(), protection, MAP_SHARED, file, 0);
    if (mapping == MAP_FAILED) abort();
    return static_cast<char*>(mapping);
  }

  struct Block {
    size_t end;
    bool is_free;
  };

  size_t used() const { return blocks_.empty() ? 0 : blocks_.back().end; }

  char* device_;
  char* host_;
  std::mutex mu_;
  std::vector<Block> blocks_;  // One after the other.
};

int Copy(void* to, const void* from, size_t size) {
  Log("copy %zu\n", size);
  if (size == 0) return kSuccess;
  if (to == nullptr || from == nullptr) return kIllegalAddress;
  memcpy(to, from, size);
  return kSuccess;
}

template <class T>
int Fill(uint64_t to, T value, size_t count) {
  Log("fill %zu\n", count * sizeof(T));
  T* host = reinterpret_cast<T*>(Memory::Get().Host(to, count * sizeof(T)));
  if (host == nullptr) return kIllegalAddress;
  std::fill_n(host, count, value);
  return kSuccess;
}

// The image that was loaded, and its kernels' names.
struct Module {
  std::string text;
};

struct Function {
  std::string name;
  void (*run)(const void* table);
};

// How long an image is: the driver is told only where it begins.
size_t SizeOfImage(const char* image) {
  if (memcmp(image, "\177ELF", 4) != 0) return strlen(image);
  const auto number = [image](size_t at, auto x) {
    memcpy(&x, image + at, sizeof(x));
    return static_cast<size_t>(x);
  };
  const size_t sections = number(0x28, uint64_t());
  const size_t size = number(0x3a, uint16_t());
  const size_t count = number(0x3c, uint16_t());
  size_t end = sections + size * count;
  for (size_t i = 0; i < count; ++i) {
    const size_t section = sections + i * size;
    constexpr size_t kNoBits = 8;
    if (number(section + 4, uint32_t()) == kNoBits) continue;
    end = std::max(end, number(section + 0x18, uint64_t()) +
                            number(section + 0x20, uint64_t()));
  }
  return end;
}

std::string RuleOf(const std::string& kernel) {
  const size_t begin = kernel.find('_', strlen("wrapopt_")) + 1;
  return kernel.substr(begin, kernel.rfind('_') - begin);
}

bool Move(Word* address, size_t size = 1) {
  char* const host = Memory::Get().Host(*address, size);
  *address = reinterpret_cast<Word>(host);
  return host != nullptr;
}

// Moves the addresses in a table to where the host finds them.
template <class Table>
int MoveAddresses(const std::string& kernel, Table* table) {
  const std::string rule = RuleOf(kernel);
  const gpu::Header& header = table->header;
  const size_t operands = header.sources + header.targets;
  size_t scalars = 0;
  std::vector<size_t> sizes;  // Of each array's elements.
  for (const RuleInfo& info : kRules) {
    if (rule != info.name) continue;
    scalars = CountNames(info.scalars);
    sizes.assign(CountNames(info.states),
                 SizeOf(static_cast<Number>(header.state)));
    sizes.resize(sizes.size() + CountNames(info.inputs),
                 SizeOf(static_cast<Number>(header.input)));
  }
  const bool is_of_program = kernel.find("_program_") != std::string::npos;
  const auto move_number = [is_of_program](Word* word) {
    return !is_of_program || Move(word, sizeof(double));
  };
  Word* word = table->words;
  for (size_t c = 0; c < scalars; ++c, ++word) {
    if (!move_number(word)) return kIllegalAddress;
  }
  for (size_t m = 0; m < operands; ++m, word += gpu::kWordsPerOperand) {
    if (!move_number(word)) return kIllegalAddress;
    sizes.push_back(SizeOf(static_cast<Number>(word[1])));
  }
  if (is_of_program && !Move(word++)) return kIllegalAddress;
  const size_t numbers = sizes.size();
  if (header.is_lazy) {
    sizes.resize(numbers + 2 * header.targets, sizeof(double));
  }
  Word* const bases = word;
  const char* entry = reinterpret_cast<const char*>(bases + sizes.size());
  const size_t row = (1 + sizes.size() + header.is_lazy) * sizeof(uint32_t);
  if (entry + header.variables * row > reinterpret_cast<char*>(table + 1)) {
    return kInvalidValue;
  }
  const auto number = [&entry, row](uint32_t variable, size_t i) {
    uint32_t x;
    memcpy(&x, entry + variable * row + i * sizeof(x), sizeof(x));
    return x;
  };
  for (uint32_t v = 0; v < header.variables; ++v) {
    const uint32_t place = number(v, 0);
    const uint32_t end = v + 1 < header.variables
                             ? gpu::FirstChunk(number(v + 1, 0))
                             : header.chunks;
    const uint64_t elements =
        (uint64_t{end - gpu::FirstChunk(place) - 1} << header.chunk_log2) +
        gpu::LastElements(place);
    const uint32_t in_row = header.is_lazy ? number(v, 1 + sizes.size()) : 0;
    const uint64_t rows = in_row == 0 ? 1 : elements / in_row;
    for (size_t a = 0; a < sizes.size(); ++a) {
      const uint32_t offset = number(v, 1 + a);
      const uint64_t count = a < numbers                    ? elements
                             : a < numbers + header.targets ? rows
                                                            : 1;
      if (offset != gpu::kNoArray &&
          Memory::Get().Host(bases[a] + offset * sizes[a],
                             count * sizes[a]) == nullptr) {
        return kIllegalAddress;
      }
    }
  }
  for (size_t a = 0; a < sizes.size(); ++a) {
    // Without one, all are inputs of zeros.
    if (bases[a] != 0 && !Move(&bases[a])) return kIllegalAddress;
  }
  return kSuccess;
}

// As the images are compiled: a GPU flushes the subnormal numbers of float, and
// knows no way to flush those of double.
class SubnormalsOfGpu {
 public:
  explicit SubnormalsOfGpu(const Function& function)
      : before_(Mode::Get()) {
    const bool is_double =
        function.name.rfind("_double") != std::string::npos;
    Mode::Set(is_double ? before_ & ~Mode::kFlush : before_ | Mode::kFlush);
  }
  ~SubnormalsOfGpu() { Mode::Set(before_); }

 private:
  using Mode = wrapopt::FlushSubnormals;
  const Mode::Register before_;
};

int Run(const Function& function, const void* table) {
  const SubnormalsOfGpu subnormals(function);
  const Index all = grid;
  for (block.y = 0; block.y < all.y; ++block.y) {
    for (block.x = 0; block.x < all.x; ++block.x) {
      for (thread.x = 0; thread.x < gpu::kThreads; ++thread.x) {
        function.run(table);
      }
    }
  }
  return kSuccess;
}

template <class MarkTable>
int MoveLogDecays(MarkTable* table) {
  Word* target = table->words;
  for (size_t t = 0; t < table->header.targets; ++t) {
    if (Memory::Get().Host(target[0], (target[1] + 1) * sizeof(double)) ==
            nullptr ||
        !Move(&target[0])) {
      return kIllegalAddress;
    }
    target += gpu::kWordsPerMark;
  }
  return kSuccess;
}

// What a launch does, its argument taken along.
template <class Table, class SumTable, class MarkTable>
std::function<int()> ReadLaunch(const Function& function,
                                const void* argument) {
  const Index all = grid;
  if (RuleOf(function.name) == "Sum") {
    return [function, all, table = *static_cast<const SumTable*>(argument)] {
      auto moved = table;
      grid = all;
      Log("launch %s grid %u %u\n", function.name.c_str(), all.x, all.y);
      if (!Move(&moved.header.grads) || !Move(&moved.header.sums)) {
        return kIllegalAddress;
      }
      return Run(function, &moved);
    };
  }
  if (RuleOf(function.name) == "Mark") {
    return [function, all, table = *static_cast<const MarkTable*>(argument)] {
      auto moved = table;
      grid = all;
      Log("launch %s grid %u %u\n", function.name.c_str(), all.x, all.y);
      const int result = MoveLogDecays(&moved);
      return result != kSuccess ? result : Run(function, &moved);
    };
  }
  return [function, all, table = *static_cast<const Table*>(argument)] {
    auto moved = table;
    grid = all;
    Log("launch %s grid %u %u variables %u\n", function.name.c_str(), all.x,
        all.y, moved.header.variables);
    const int result = MoveAddresses(function.name, &moved);
    return result != kSuccess ? result : Run(function, &moved);
  };
}

// Launches that a stream was asked for while it was captured.
struct Graph {
  std::vector<std::function<int()>> launches;
  bool is_invalid = false;
};

// What is being captured, of whichever stream: nothing but launches may be
// asked for in the meantime.
Graph* captured = nullptr;

// Whether a graph is being captured, which the caller has just spoilt.
bool SpoilsCapture() {
  if (captured == nullptr) return false;
  captured->is_invalid = true;
  return true;
}

thread_local void* current = nullptr;
char context;

void* NewObject() { return malloc(8); }

}  // namespace
}  // namespace fake_gpu
}  // namespace wrapopt

using namespace wrapopt::fake_gpu;  // NOLINT

#define API(name, ...)                                      \
  extern "C" __attribute__((visibility("default"))) int name(__VA_ARGS__)

// Those that have nothing to do.
#define NOTHING(name, ...) API(name, ##__VA_ARGS__) { return kSuccess; }

// In those that the host waits in, or that change memory or modules.
#define NOT_IN_A_CAPTURE() \
  if (SpoilsCapture()) return kStreamCaptureUnsupported

NOTHING(cuInit, unsigned)
NOTHING(cuDevicePrimaryCtxRelease_v2, int)
NOTHING(cuDevicePrimaryCtxSetFlags_v2, int, unsigned)
API(cuCtxSynchronize) {
  NOT_IN_A_CAPTURE();
  return kSuccess;
}
API(cuStreamSynchronize, void*) {
  NOT_IN_A_CAPTURE();
  return kSuccess;
}
API(cuStreamQuery, void*) {
  NOT_IN_A_CAPTURE();
  return kSuccess;
}
NOTHING(cuStreamWaitEvent, void*, void*, unsigned)
NOTHING(cuEventRecord, void*, void*)
NOTHING(cuEventQuery, void*)
API(cuEventSynchronize, void*) {
  NOT_IN_A_CAPTURE();
  return kSuccess;
}
API(cuMemFree_v2, uint64_t address) {
  NOT_IN_A_CAPTURE();
  return Memory::Get().Free(address);
}
NOTHING(cuMemHostRegister_v2, void*, size_t, unsigned)
NOTHING(cuMemHostUnregister, void*)
NOTHING(cuFuncSetAttribute, void*, int, int)
NOTHING(cuFuncSetCacheConfig, void*, int)

API(cuDriverGetVersion, int* version) {
  *version = Setting("WRAPOPT_FAKE_GPU_DRIVER", 12080);
  return kSuccess;
}
API(cuDeviceGetCount, int* count) {
  *count = 1;
  return kSuccess;
}
API(cuDeviceGet, int* device, int) {
  *device = 0;
  return kSuccess;
}
API(cuDeviceGetName, char* name, int size, int) {
  snprintf(name, size, "fake GPU");
  return kSuccess;
}
API(cuDeviceTotalMem_v2, size_t* size, int) {
  *size = AllMemory();
  return kSuccess;
}
API(cuDeviceGetUuid, void* uuid, int) {
  memset(uuid, 7, 16);
  return kSuccess;
}
API(cuDeviceGetUuid_v2, void* uuid, int) {
  memset(uuid, 7, 16);
  return kSuccess;
}
API(cuDeviceGetPCIBusId, char* id, int size, int) {
  snprintf(id, size, "0000:01:00.0");
  return kSuccess;
}
API(cuDeviceGetAttribute, int* value, int attribute, int) {
  const int cc = Setting("WRAPOPT_FAKE_GPU_CC", 90);
  switch (attribute) {
    case 1:  // Threads of a block, and each of a block's dimensions.
    case 2:
    case 3:
      *value = 1024;
      break;
    case 4:
      *value = 64;
      break;
    case 5:  // A grid's dimensions.
      *value = 2147483647;
      break;
    case 6:
    case 7:
      *value = 65535;
      break;
    case 8:  // Shared memory of a block.
      *value = 49152;
      break;
    case 10:  // Threads of a warp.
      *value = 32;
      break;
    case 12:  // Registers of a block, and of a multiprocessor.
    case 82:
      *value = 65536;
      break;
    case 13:  // Clock rates.
    case 36:
      *value = 1980000;
      break;
    case 16:  // Multiprocessors.
      *value = 132;
      break;
    case 33:   // The bus's number.
    case 41:   // Unified addresses.
    case 102:  // Management of virtual memory.
      *value = 1;
      break;
    case 37:  // Width of the bus to memory.
      *value = 6144;
      break;
    case 38:  // Second-level cache.
      *value = 50 << 20;
      break;
    case 39:  // Threads of a multiprocessor.
      *value = 2048;
      break;
    case 75:
      *value = cc / 10;
      break;
    case 76:
      *value = cc % 10;
      break;
    case 81:  // Shared memory of a multiprocessor, and the most of a block.
    case 97:
      *value = 233472;
      break;
    default:
      *value = 0;
  }
  return kSuccess;
}
API(cuDevicePrimaryCtxRetain, void** result, int) {
  *result = &context;
  return kSuccess;
}
API(cuDevicePrimaryCtxGetState, int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return kSuccess;
}
API(cuCtxSetCurrent, void* to) {
  current = to;
  return kSuccess;
}
API(cuCtxGetCurrent, void** result) {
  *result = current;
  return kSuccess;
}
API(cuCtxGetDevice, int* device) {
  *device = 0;
  return kSuccess;
}
API(cuCtxGetApiVersion, void*, unsigned* version) {
  *version = 12080;
  return kSuccess;
}
API(cuCtxPushCurrent_v2, void* to) {
  current = to;
  return kSuccess;
}
API(cuCtxPopCurrent_v2, void** result) {
  if (result != nullptr) *result = current;
  return kSuccess;
}
API(cuCtxGetStreamPriorityRange, int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return kSuccess;
}
API(cuStreamCreate, void** stream, unsigned) {
  *stream = NewObject();
  return kSuccess;
}
API(cuStreamCreateWithPriority, void** stream, unsigned, int) {
  *stream = NewObject();
  return kSuccess;
}
API(cuStreamDestroy_v2, void* stream) {
  free(stream);
  return kSuccess;
}
API(cuStreamIsCapturing, void*, int* status) {
  *status = captured != nullptr;
  return kSuccess;
}
API(cuStreamBeginCapture_v2, void*, int) {
  NOT_IN_A_CAPTURE();
  captured = new Graph();
  return kSuccess;
}
API(cuStreamEndCapture, void*, Graph** graph) {
  if (captured == nullptr) return kInvalidValue;
  *graph = std::exchange(captured, nullptr);
  if (!(*graph)->is_invalid) return kSuccess;
  delete std::exchange(*graph, nullptr);
  return kStreamCaptureInvalidated;
}
API(cuGraphGetNodes, Graph* graph, void** nodes, size_t* count) {
  if (nodes != nullptr) return kInvalidValue;  // How many is all that is known.
  *count = graph->launches.size();
  return kSuccess;
}
API(cuGraphInstantiateWithFlags, Graph** executable, Graph* graph, uint64_t) {
  *executable = new Graph(*graph);
  return kSuccess;
}
API(cuGraphLaunch, Graph* executable, void*) {
  NOT_IN_A_CAPTURE();
  Log("graph of %zu launches\n", executable->launches.size());
  for (const auto& launch : executable->launches) {
    if (const int result = launch(); result != kSuccess) return result;
  }
  return kSuccess;
}
API(cuGraphDestroy, Graph* graph) {
  delete graph;
  return kSuccess;
}
API(cuGraphExecDestroy, Graph* executable) {
  delete executable;
  return kSuccess;
}
API(cuLaunchHostFunc, void*, void (*function)(void*), void* data) {
  function(data);
  return kSuccess;
}
API(cuEventCreate, void** event, unsigned) {
  *event = NewObject();
  return kSuccess;
}
API(cuEventDestroy_v2, void* event) {
  free(event);
  return kSuccess;
}
API(cuEventElapsedTime, float* milliseconds, void*, void*) {
  *milliseconds = 1;
  return kSuccess;
}
API(cuMemGetInfo_v2, size_t* free, size_t* total) {
  *free = *total = AllMemory();
  return kSuccess;
}
API(cuMemAlloc_v2, uint64_t* address, size_t size) {
  NOT_IN_A_CAPTURE();
  return Memory::Get().Allocate(size, address);
}
// Memory of which TensorFlow 2.22 reserves addresses first. All of it is there.
API(cuMemGetAllocationGranularity, size_t* bytes, const void*, unsigned) {
  *bytes = 2 << 20;
  return kSuccess;
}
API(cuMemAddressReserve, uint64_t* address, size_t size, size_t, uint64_t,
    uint64_t) {
  return cuMemAlloc_v2(address, size);
}
API(cuMemAddressFree, uint64_t address, size_t) {
  return cuMemFree_v2(address);
}
API(cuMemCreate, uint64_t* handle, size_t, const void*, uint64_t) {
  *handle = 1;
  return kSuccess;
}
NOTHING(cuMemRelease, uint64_t)
NOTHING(cuMemMap, uint64_t, size_t, size_t, uint64_t, uint64_t)
NOTHING(cuMemUnmap, uint64_t, size_t)
NOTHING(cuMemSetAccess, uint64_t, size_t, const void*, size_t)
API(cuMemHostAlloc, void** memory, size_t size, unsigned) {
  NOT_IN_A_CAPTURE();
  return posix_memalign(memory, 256, size) == 0 ? kSuccess : kOutOfMemory;
}
API(cuMemAllocHost_v2, void** memory, size_t size) {
  NOT_IN_A_CAPTURE();
  return posix_memalign(memory, 256, size) == 0 ? kSuccess : kOutOfMemory;
}
API(cuMemFreeHost, void* memory) {
  NOT_IN_A_CAPTURE();
  free(memory);
  return kSuccess;
}
API(cuMemHostGetDevicePointer_v2, uint64_t* address, void* memory, unsigned) {
  *address = reinterpret_cast<uint64_t>(memory);
  return kSuccess;
}
API(cuMemGetAddressRange_v2, uint64_t* base, size_t* size, uint64_t address) {
  *base = address;
  *size = 0;
  return kSuccess;
}
API(cuPointerGetAttribute, void* value, int attribute, uint64_t) {
  constexpr int kMemoryType = 2, kOfDevice = 2;
  *static_cast<int*>(value) = attribute == kMemoryType ? kOfDevice : 0;
  return kSuccess;
}
API(cuDeviceCanAccessPeer, int* can, int, int) {
  *can = 0;
  return kSuccess;
}

API(cuMemcpyHtoD_v2, uint64_t to, const void* from, size_t size) {
  NOT_IN_A_CAPTURE();
  return Copy(Memory::Get().Host(to, size), from, size);
}
API(cuMemcpyDtoH_v2, void* to, uint64_t from, size_t size) {
  NOT_IN_A_CAPTURE();
  return Copy(to, Memory::Get().Host(from, size), size);
}
API(cuMemcpyDtoD_v2, uint64_t to, uint64_t from, size_t size) {
  NOT_IN_A_CAPTURE();
  return Copy(Memory::Get().Host(to, size), Memory::Get().Host(from, size),
              size);
}
API(cuMemcpyHtoDAsync_v2, uint64_t to, const void* from, size_t size, void*) {
  return cuMemcpyHtoD_v2(to, from, size);
}
API(cuMemcpyDtoHAsync_v2, void* to, uint64_t from, size_t size, void*) {
  return cuMemcpyDtoH_v2(to, from, size);
}
API(cuMemcpyDtoDAsync_v2, uint64_t to, uint64_t from, size_t size, void*) {
  return cuMemcpyDtoD_v2(to, from, size);
}
API(cuMemsetD8_v2, uint64_t to, unsigned char value, size_t count) {
  NOT_IN_A_CAPTURE();
  return Fill(to, value, count);
}
API(cuMemsetD8Async, uint64_t to, unsigned char value, size_t count, void*) {
  NOT_IN_A_CAPTURE();
  return Fill(to, value, count);
}
API(cuMemsetD32_v2, uint64_t to, unsigned value, size_t count) {
  NOT_IN_A_CAPTURE();
  return Fill(to, value, count);
}
API(cuMemsetD32Async, uint64_t to, unsigned value, size_t count, void*) {
  NOT_IN_A_CAPTURE();
  return Fill(to, value, count);
}

API(cuGetErrorName, int result, const char** name) {
  *name = result == kSuccess ? "CUDA_SUCCESS" : "CUDA_ERROR";
  return kSuccess;
}
API(cuGetErrorString, int result, const char** text) {
  switch (result) {
    case kSuccess:
      *text = "no error";
      break;
    case kOutOfMemory:
      *text = "out of memory";
      break;
    case kInvalidImage:
      *text = "device kernel image is invalid";
      break;
    case kNotFound:
      *text = "named symbol not found";
      break;
    case kIllegalAddress:
      *text = "an illegal memory access was encountered";
      break;
    default:
      *text = "invalid argument";
  }
  return kSuccess;
}

API(cuModuleLoadData, Module** module, const char* image) {
  NOT_IN_A_CAPTURE();
  const bool is_ptx = memcmp(image, "\177ELF", 4) != 0;
  *module = new Module{std::string(image, SizeOfImage(image))};
  Log("image %s %zu\n", is_ptx ? "ptx" : "cubin", (*module)->text.size());
  return kSuccess;
}
API(cuModuleLoadDataEx, Module** module, const char* image, unsigned, void*,
    void**) {
  return cuModuleLoadData(module, image);
}
API(cuModuleLoadFatBinary, Module**, const void*) { return kInvalidImage; }
API(cuModuleUnload, Module*) {
  NOT_IN_A_CAPTURE();
  return kSuccess;
}
API(cuModuleGetFunction, Function** function, Module* module,
    const char* name) {
  // Both the image and the emulation must have it.
  Dl_info self;
  if (module->text.find(name) == std::string::npos ||
      dladdr(reinterpret_cast<void*>(&Run), &self) == 0) {
    return kNotFound;
  }
  void* library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  void* run = dlsym(library, name);
  dlclose(library);
  if (run == nullptr) return kNotFound;
  *function = new Function{name, reinterpret_cast<void (*)(const void*)>(run)};
  return kSuccess;
}
API(cuFuncGetAttribute, int* value, int, Function*) {
  *value = 0;
  return kSuccess;
}
API(cuLaunchKernel, Function* function, unsigned grid_x, unsigned grid_y,
    unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
    unsigned shared_bytes, void*, void** arguments, void** extra) {
  if (current == nullptr || grid_x == 0 || grid_x > 0x7fffffff ||
      grid_y == 0 || grid_y > 65535 || grid_z != 1 ||
      block_x != wrapopt::gpu::kThreads || block_y != 1 || block_z != 1 ||
      shared_bytes != 0 || extra != nullptr) {
    return kInvalidValue;
  }
  using namespace wrapopt::gpu;  // NOLINT
  grid = {grid_x, grid_y};
  std::function<int()> launch =
      function->name.find("_small_") != std::string::npos
          ? ReadLaunch<SmallTable, SmallSumTable, SmallMarkTable>(
                *function, arguments[0])
          : ReadLaunch<LargeTable, LargeSumTable, LargeMarkTable>(
                *function, arguments[0]);
  if (captured == nullptr) return launch();
  captured->launches.push_back(std::move(launch));
  return kSuccess;
}
