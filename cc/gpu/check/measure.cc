#include "cc/gpu/check/measure.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace wrapopt {
namespace gpu {

std::vector<double> Seconds(const std::vector<std::function<void()>>& works) {
  void *begin, *end;
  Call("cuEventCreate", &begin, 0u);
  Call("cuEventCreate", &end, 0u);
  constexpr int kWarmUp = 3, kTurns = 21;
  std::vector<std::vector<float>> times(works.size());
  for (int turn = 0; turn < kWarmUp + kTurns; ++turn) {
    for (size_t w = 0; w < works.size(); ++w) {
      Call("cuEventRecord", begin, stream);
      works[w]();
      Call("cuEventRecord", end, stream);
      Call("cuEventSynchronize", end);
      float milliseconds;
      Call("cuEventElapsedTime", &milliseconds, begin, end);
      if (turn >= kWarmUp) times[w].push_back(milliseconds);
    }
  }
  Call("cuEventDestroy_v2", begin);
  Call("cuEventDestroy_v2", end);
  std::vector<double> medians;
  for (std::vector<float>& of_one : times) {
    std::nth_element(of_one.begin(), of_one.begin() + kTurns / 2, of_one.end());
    medians.push_back(of_one[kTurns / 2] / 1000);
  }
  return medians;
}

std::vector<uint64_t> ResNet50() {
  std::vector<uint64_t> sizes = {7 * 7 * 3 * 64, 64, 64};
  auto convolution = [&](uint64_t width, uint64_t in, uint64_t out) {
    sizes.insert(sizes.end(), {width * width * in * out, out, out});
  };
  uint64_t in = 64;
  for (const auto& [blocks, width] :
       {std::pair<int, uint64_t>(3, 64), {4, 128}, {6, 256}, {3, 512}}) {
    for (int block = 0; block < blocks; ++block) {
      convolution(1, in, width);
      convolution(3, width, width);
      convolution(1, width, 4 * width);
      if (block == 0) convolution(1, in, 4 * width);
      in = 4 * width;
    }
  }
  sizes.insert(sizes.end(), {2048 * 1000, 1000});
  return sizes;
}

Sizes OneLarge(Number number) {
  const uint64_t mib = std::min<uint64_t>(1024, FreeMemory() / 8 >> 20);
  return {"one, " + std::to_string(mib) + " MiB",
          {(mib << 20) / SizeOf(number)}};
}

}  // namespace gpu
}  // namespace wrapopt
