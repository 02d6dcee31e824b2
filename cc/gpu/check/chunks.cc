// Measures the GPU kernels with blocks of each size.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "cc/engine/number.h"
#include "cc/gpu/check/device.h"
#include "cc/gpu/check/measure.h"
#include "cc/gpu/table.h"
#include "cc/rules/rules.h"

namespace wrapopt {
namespace gpu {
namespace {

int MeasureChunks(uint64_t divisor) {
  for (const Number number : {Number::kFloat, Number::kBfloat16}) {
    for (const Sizes& sizes :
         {OneLarge(number), Sizes("ResNet-50", ResNet50())}) {
      for (const RuleInfo* rule :
           {static_cast<const RuleInfo*>(nullptr), &Info(RuleId::kAdam)}) {
        Work work(sizes.first, rule, number, sizes.second, divisor);
        // 0 is the launcher's own choice.
        std::vector<int> log2s = {0};
        std::vector<std::function<void()>> works;
        for (int k = kMinChunkLog2; k <= kMaxChunkLog2; ++k) log2s.push_back(k);
        for (const int log2 : log2s) {
          works.push_back([&work, log2] {
            work.set_chunk_log2(log2);
            work.Enqueue();
          });
        }
        const std::vector<double> seconds = Seconds(works);
        std::printf("%s", work.name().c_str());
        for (size_t i = 0; i < log2s.size(); ++i) {
          const std::string log2 =
              i == 0 ? "chosen" : "2^" + std::to_string(log2s[i]);
          std::printf(" %s %.0f", log2.c_str(),
                      work.moved() / seconds[i] / 1e9);
        }
        std::printf(" GB/s\n");
        std::fflush(stdout);
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace gpu
}  // namespace wrapopt

// An argument divides the sizes of all arrays.
int main(int argc, char** argv) {
  wrapopt::gpu::Start();
  return wrapopt::gpu::MeasureChunks(
      argc > 1 ? std::max(1ll, std::atoll(argv[1])) : 1);
}
