#include "cc/gpu/loaded_kernels.h"

#include <map>

namespace wrapopt {
namespace gpu {
namespace {

std::string KernelName(int kernel, bool is_double, Kind kind) {
  return "wrapopt_" + NameOf(kind) + "_" +
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

std::string LoadedKernels::Find(int kernel, bool is_double, Kind kind,
                                Function* function) {
  const std::lock_guard<std::mutex> lock(mu_);
  const int k = static_cast<int>(kind);
  if (kind == Kind::kProgram && !Has(kind)) return NoProgramImage(device_);
  Function& found = functions_[k][kernel][is_double];
  if (found == nullptr) {
    const Driver& driver = GetDriver();
    Module& module = modules_[k];
    if (module == nullptr) {
      const Image& image = *images_[k];
      std::string expanded;
      const std::string error = Expand(image, &expanded);
      if (!error.empty()) return error;
      const Result result = driver.ModuleLoadData(&module, expanded.data());
      if (result != 0) {
        module = nullptr;
        return ErrorText("loading the image " + NameOf(image) + " for " +
                             device_.name,
                         result);
      }
    }
    const std::string name = KernelName(kernel, is_double, kind);
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
  const auto has_any = [this] {
    return Has(Kind::kSmall) || Has(Kind::kLarge);
  };
  if (has_any()) return "";
  Device device;
  const Result result = GetDriver().CtxGetDevice(&device);
  if (result != 0) return ErrorText("cuCtxGetDevice", result);
  const std::string error = Describe(device, &device_);
  if (!error.empty()) return error;
  for (const Kind kind : kKinds) {
    images_[static_cast<int>(kind)] = ChooseImage(device_, kind);
  }
  return has_any() ? "" : NoImage(device_);
}

}  // namespace gpu
}  // namespace wrapopt
