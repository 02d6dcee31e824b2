// Compares the bandwidth of the GPU kernels with that of a copy, also with
// chunks of each size.
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

int MeasureBandwidth(uint64_t divisor) {
  std::vector<uint64_t> tiny;
  for (int i = 0; i < 4000; ++i) tiny.push_back(64 + generator() % 4000);
  for (const Number number : {Number::kFloat, Number::kBfloat16,
                              Number::kHalf, Number::kDouble}) {
    for (const Sizes& sizes : {OneLarge(number), Sizes("ResNet-50", ResNet50()),
                               Sizes("4000 small", tiny)}) {
      for (const RuleInfo* rule :
           {static_cast<const RuleInfo*>(nullptr), &Info(RuleId::kMomentum),
            &Info(RuleId::kAdam)}) {
        Work work(sizes.first, rule, number, sizes.second, divisor);
        // 0 is the launcher's own choice.
        std::vector<int> log2s = {0};
        for (int k = kMinChunkLog2; k <= kMaxChunkLog2; ++k) log2s.push_back(k);
        std::vector<std::function<void()>> works;
        for (const int log2 : log2s) {
          works.push_back([&work, log2] {
            work.set_chunk_log2(log2);
            work.Enqueue();
          });
        }
        works.push_back([&work] { work.EnqueueCopy(); });
        const std::vector<double> seconds = Seconds(works);
        const double speed = work.moved() / seconds[0];
        const double copy = work.copied() / seconds.back();
        work.set_chunk_log2(0);
        std::printf("%s %9.2f MB moved %9.4f ms %7.0f GB/s, %5.1f %% of a "
                    "copy's %.0f GB/s, %zu launches for %zu variables; chunks",
                    work.name().c_str(), work.moved() / 1e6, seconds[0] * 1e3,
                    speed / 1e9, 100 * speed / copy, copy / 1e9,
                    work.launches(), work.variables());
        for (size_t i = 1; i < log2s.size(); ++i) {
          std::printf(" 2^%d %.0f", log2s[i], work.moved() / seconds[i] / 1e9);
        }
        std::printf("\n");
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
  return wrapopt::gpu::MeasureBandwidth(
      argc > 1 ? std::max(1ll, std::atoll(argv[1])) : 1);
}
