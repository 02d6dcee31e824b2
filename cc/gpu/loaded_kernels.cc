#include "cc/gpu/loaded_kernels.h"

#include <map>

extern "C" __attribute__((visibility("hidden"))) const char
    wrapopt_gpu_images[];

namespace wrapopt {
namespace gpu {
namespace {

std::string KernelName(int kernel, bool is_double, bool is_large) {
  return std::string("wrapopt_") + (is_large ? "large_" : "small_") +
         (kernel == kAverage   ? "Average"
          : kernel == kCatchUp ? "CatchUp"
          : kernel == kSum     ? "Sum"
          : kernel == kMark    ? "Mark"
                               : kRulesById[kernel].name) +
         (is_double ? "_double" : "_float");
}

}  // namespace

std::string LoadedKernels::Current(LoadedKernels** loaded) {
  const Driver& driver = GetDriver();
  if (!driver.missing.empty()) return "there is no " + driver.missing;
  Context context = nullptr;
  const Result result = driver.CtxGetCurrent(&context);
  if (result != 0) return ErrorText("cuCtxGetCurrent", result);
  if (context == nullptr) return "no CUDA context is current";
  static std::mutex mu;
  static auto* const all = new std::map<Context, LoadedKernels>();
  const std::lock_guard<std::mutex> lock(mu);
  *loaded = &(*all)[context];
  return (*loaded)->Init();
}

std::string LoadedKernels::Find(int kernel, bool is_double, bool is_large,
                                Function* function) {
  const std::lock_guard<std::mutex> lock(mu_);
  Function& found = functions_[is_large][kernel][is_double];
  if (found == nullptr) {
    const Driver& driver = GetDriver();
    Module& module = modules_[is_large];
    if (module == nullptr) {
      const Image& image = *images_[is_large];
      const Result result = driver.ModuleLoadData(
          &module, wrapopt_gpu_images + image.offset);
      if (result != 0) {
        module = nullptr;
        return ErrorText("loading the image " + NameOf(image) + " for " +
                             device_.name,
                         result);
      }
    }
    const std::string name = KernelName(kernel, is_double, is_large);
    const Result result =
        driver.ModuleGetFunction(&found, module, name.c_str());
    if (result != 0) {
      found = nullptr;
      return ErrorText("finding the kernel " + name, result);
    }
  }
  *function = found;
  return "";
}

std::string LoadedKernels::Init() {
  const std::lock_guard<std::mutex> lock(mu_);
  if (Has(false) || Has(true)) return "";
  Device device;
  const Result result = GetDriver().CtxGetDevice(&device);
  if (result != 0) return ErrorText("cuCtxGetDevice", result);
  const std::string error = Describe(device, &device_);
  if (!error.empty()) return error;
  for (const bool is_large : {false, true}) {
    images_[is_large] = ChooseImage(device_, is_large);
  }
  return Has(false) || Has(true) ? "" : NoImage(device_);
}

}  // namespace gpu
}  // namespace wrapopt
