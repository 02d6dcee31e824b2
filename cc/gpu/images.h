// The kernels as machine code, one image for each kind of GPU.
#ifndef WRAPOPT_CC_GPU_IMAGES_H_
#define WRAPOPT_CC_GPU_IMAGES_H_

#include <cstddef>
#include <string>
#include <vector>

#include "cc/gpu/driver.h"

namespace wrapopt {
namespace gpu {

// The kind of kernels in an image.
enum class Kind {
  kSmall,  // They take small tables.
  kLarge,  // They take large tables.
  kProgram,  // Programs of XLA launch them, with large tables.
};
inline constexpr Kind kKinds[] = {Kind::kSmall, Kind::kLarge, Kind::kProgram};

// "small" for kSmall.
std::string NameOf(Kind kind);

struct Image {
  bool is_ptx;             // PTX, which the driver compiles, or machine code.
  int compute_capability;  // 10 * major + minor.
  Kind kind;
  const char* xz;  // The image, compressed in the format of xz.
  size_t xz_bytes;
  size_t bytes;  // Of the image itself.
};

// "sm_90" or "compute_90", with the kind if it is not kSmall.
std::string NameOf(const Image& image);

// Expands an image. Returns an error's text, empty if there is none.
std::string Expand(const Image& image, std::string* expanded);

// Defined apart from the other functions: a test has other images.
const std::vector<Image>& Images();

// The image of a kind for a GPU, or nullptr. Large tables need compute
// capability 7.0 and a driver for CUDA 12.1.
const Image* ChooseImage(const DeviceInfo& device, Kind kind);

// The error text if there is no image for a GPU.
std::string NoImage(const DeviceInfo& device);

// The error text if there is none of the kind kProgram.
std::string NoProgramImage(const DeviceInfo& device);

}  // namespace gpu
}  // namespace wrapopt

#endif  // WRAPOPT_CC_GPU_IMAGES_H_
