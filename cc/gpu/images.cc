#include "cc/gpu/images.h"

namespace wrapopt {
namespace gpu {
namespace {

// Machine code runs on GPUs of its major version with the same or a later minor
// version. The driver compiles PTX for any GPU that is not older.
bool Fits(const Image& image, int compute_capability) {
  return image.compute_capability <= compute_capability &&
         (image.is_ptx ||
          image.compute_capability / 10 == compute_capability / 10);
}

bool IsBetter(const Image& image, const Image& than) {
  if (image.is_ptx != than.is_ptx) return than.is_ptx;
  return image.compute_capability > than.compute_capability;
}

}  // namespace

std::string NameOf(Kind kind) {
  switch (kind) {
    case Kind::kSmall:
      return "small";
    case Kind::kLarge:
      return "large";
    case Kind::kCompensated:
      return "compensated";
  }
  return "";
}

std::string NameOf(const Image& image) {
  return (image.is_ptx ? "compute_" : "sm_") +
         std::to_string(image.compute_capability) +
         (image.kind == Kind::kSmall ? "" : " " + NameOf(image.kind));
}

const Image* ChooseImage(const DeviceInfo& device, Kind kind) {
  if (kind == Kind::kLarge &&
      (device.compute_capability < 70 || device.driver < 12010)) {
    return nullptr;
  }
  if (kind == Kind::kCompensated &&
      ChooseImage(device, Kind::kSmall) == nullptr &&
      ChooseImage(device, Kind::kLarge) == nullptr) {
    return nullptr;
  }
  const Image* best = nullptr;
  for (const Image& image : Images()) {
    if (image.kind == kind && Fits(image, device.compute_capability) &&
        (best == nullptr || IsBetter(image, *best))) {
      best = &image;
    }
  }
  return best;
}

std::string NoImage(const DeviceInfo& device) {
  std::string names;
  for (const Image& image : Images()) {
    names += (names.empty() ? "" : ", ") + NameOf(image);
  }
  return "there are no kernels for " + device.name +
         " (compute capability " +
         std::to_string(device.compute_capability / 10) + "." +
         std::to_string(device.compute_capability % 10) +
         ", driver for CUDA " + std::to_string(device.driver / 1000) + "." +
         std::to_string(device.driver % 1000 / 10) +
         "); this wrapopt has images for " + names +
         ". Place the variables on the CPU, or add the GPU's architecture to "
         "cc/gpu/BUILD and build wrapopt again";
}

}  // namespace gpu
}  // namespace wrapopt
