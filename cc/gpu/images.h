// The kernels as machine code, one image for each kind of GPU.
#ifndef WRAPOPT_CC_GPU_IMAGES_H_
#define WRAPOPT_CC_GPU_IMAGES_H_

#include <cstddef>
#include <string>
#include <vector>

#include "cc/gpu/driver.h"

namespace wrapopt {
namespace gpu {

struct Image {
  bool is_ptx;             // Text that the driver compiles, or machine code.
  int compute_capability;  // 10 * major + minor.
  bool is_large;           // What size of tables its kernels take.
  size_t offset;           // Where it is among the images.
  size_t size;
};

// "sm_90", "compute_90"; with "large" where it is.
std::string NameOf(const Image& image);

const std::vector<Image>& Images();

// The image for a GPU, or nullptr. Large tables need compute capability 7.0 and
// a driver for CUDA 12.1.
const Image* ChooseImage(const DeviceInfo& device, bool is_large);

// Why there is none.
std::string NoImage(const DeviceInfo& device);

}  // namespace gpu
}  // namespace wrapopt

#endif  // WRAPOPT_CC_GPU_IMAGES_H_
