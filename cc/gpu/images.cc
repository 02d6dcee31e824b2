#include "cc/gpu/images.h"

#include <dlfcn.h>

#include <cstdint>

#include "cc/old_glibc.h"

// The versions before 2.34, which moved them to another library.
WRAPOPT_OLD_GLIBC(dlopen, "2.2.5");
WRAPOPT_OLD_GLIBC(dlsym, "2.2.5");

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

std::string TextOf(const DeviceInfo& device) {
  return device.name + " (compute capability " +
         std::to_string(device.compute_capability / 10) + "." +
         std::to_string(device.compute_capability % 10) +
         ", driver for CUDA " + std::to_string(device.driver / 1000) + "." +
         std::to_string(device.driver % 1000 / 10) + ")";
}

}  // namespace

std::string NameOf(Kind kind) {
  switch (kind) {
    case Kind::kSmall:
      return "small";
    case Kind::kLarge:
      return "large";
    case Kind::kProgram:
      return "program";
  }
  return "";
}

std::string NameOf(const Image& image) {
  return (image.is_ptx ? "compute_" : "sm_") +
         std::to_string(image.compute_capability) +
         (image.kind == Kind::kSmall ? "" : " " + NameOf(image.kind));
}

std::string Expand(const Image& image, std::string* expanded) {
  // Loaded at run time, because a machine without a GPU need not have it.
  using Decode = int(uint64_t* memory_limit, uint32_t flags,
                     const void* allocator, const char* in, size_t* in_at,
                     size_t in_size, char* out, size_t* out_at,
                     size_t out_size);
  static const auto decode = [] {
    void* library = dlopen("liblzma.so.5", RTLD_NOW | RTLD_LOCAL);
    void* found = library == nullptr
                      ? nullptr
                      : dlsym(library, "lzma_stream_buffer_decode");
    return reinterpret_cast<Decode*>(found);
  }();
  if (decode == nullptr) {
    return "the images of the GPU kernels are compressed, and there is no "
           "liblzma.so.5 to expand them: install it (Debian: liblzma5, Fedora: "
           "xz-libs)";
  }
  expanded->resize(image.bytes);
  uint64_t memory_limit = uint64_t{1} << 30;
  size_t in_at = 0, out_at = 0;
  const int result = decode(&memory_limit, 0, nullptr, image.xz, &in_at,
                            image.xz_bytes, expanded->data(), &out_at,
                            image.bytes);
  if (result == 0 && out_at == image.bytes) return "";
  return "liblzma.so.5 could not expand the image " + NameOf(image) +
         " of the GPU kernels (error " + std::to_string(result) + ")";
}

const Image* ChooseImage(const DeviceInfo& device, Kind kind) {
  if (kind != Kind::kSmall &&
      (device.compute_capability < 70 || device.driver < 12010)) {
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
  return "there are no kernels for " + TextOf(device) +
         "; this wrapopt has images for " + names +
         ". Place the variables on the CPU, or add the GPU's architecture to "
         "cc/gpu/BUILD and build wrapopt again";
}

std::string NoProgramImage(const DeviceInfo& device) {
  return "there are no kernels for XLA programs on " + TextOf(device) +
         ": they need compute capability 7.0 and a driver for CUDA 12.1. Set "
         "WRAPOPT_XLA_ON_GPU=hlo";
}

}  // namespace gpu
}  // namespace wrapopt
