// Finds the GPU kernels for the current CUDA context, and loads them.
#ifndef WRAPOPT_CC_GPU_LOADED_KERNELS_H_
#define WRAPOPT_CC_GPU_LOADED_KERNELS_H_

#include <iterator>
#include <mutex>
#include <string>

#include "cc/gpu/driver.h"
#include "cc/gpu/images.h"
#include "cc/rules/rules.h"

namespace wrapopt {
namespace gpu {

// The index of an update rule's kernel is its RuleId. These are the others.
constexpr int kAverage = std::size(kRulesById);
constexpr int kCatchUp = kAverage + 1;
constexpr int kSum = kCatchUp + 1;
constexpr int kMark = kSum + 1;
constexpr int kKernels = kMark + 1;

// The images and kernels that are loaded into one context.
class LoadedKernels {
 public:
  // Finds the object of the current context. Returns an error's text, empty if
  // there is none, like the functions below.
  static std::string Current(LoadedKernels** loaded);

  const DeviceInfo& device() const { return device_; }

  // Whether there are kernels of that kind.
  bool Has(Kind kind) const {
    return images_[static_cast<int>(kind)] != nullptr;
  }

  // Finds a kernel, and loads it if this is the first call for it. The caller
  // looks for an image of its kind first, except for kProgram.
  std::string Find(int kernel, bool is_double, Kind kind, Function* function);

 private:
  std::string Init();

  std::mutex mu_;
  DeviceInfo device_;
  const Image* images_[std::size(kKinds)] = {};
  Module modules_[std::size(kKinds)] = {};
  Function functions_[std::size(kKinds)][kKernels][2] = {};
};

}  // namespace gpu
}  // namespace wrapopt

#endif  // WRAPOPT_CC_GPU_LOADED_KERNELS_H_
