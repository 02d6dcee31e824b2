#include "cc/gpu/images.h"

extern "C" __attribute__((visibility("hidden"))) const char
    wrapopt_gpu_images[];

namespace wrapopt {
namespace gpu {

const std::vector<Image>& Images() {
  static const auto* const images = new std::vector<Image>{
#include "cc/gpu/images.inc"  // Written by tools/gpu_images.py.
  };
  return *images;
}

}  // namespace gpu
}  // namespace wrapopt
