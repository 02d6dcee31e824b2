// Compares the bandwidth of the GPU kernels with that of a copy.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cc/engine/number.h"
#include "cc/gpu/check/device.h"
#include "cc/gpu/check/measure.h"
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
        const Work work(sizes.first, rule, number, sizes.second, divisor);
        const std::vector<double> seconds = Seconds(
            {[&] { work.Enqueue(); }, [&] { work.EnqueueCopy(); }});
        const double speed = work.moved() / seconds[0];
        const double copy = work.copied() / seconds[1];
        std::printf("%s %9.2f MB moved %9.4f ms %7.0f GB/s, %5.1f %% of a "
                    "copy's %.0f GB/s, %zu launches for %zu variables\n",
                    work.name().c_str(), work.moved() / 1e6, seconds[0] * 1e3,
                    speed / 1e9, 100 * speed / copy, copy / 1e9,
                    work.launches(), work.variables());
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
