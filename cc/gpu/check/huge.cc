// Checks arrays of more than 2^32 elements (2^31 if memory does not suffice).
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "cc/engine/number.h"
#include "cc/gpu/check/device.h"
#include "cc/gpu/launcher.h"

namespace wrapopt {
namespace gpu {
namespace {

int CheckHuge() {
  constexpr uint64_t kSpace = 4096;
  const auto bytes_of = [](uint64_t elements) { return 2 * elements + kSpace; };
  uint64_t elements = 0;
  for (const int log2 : {31, 32}) {
    const uint64_t more = (uint64_t{1} << log2) + 12345;
    if (FreeMemory() > 2 * bytes_of(more) + (size_t{1} << 30)) elements = more;
  }
  if (elements == 0) {
    std::printf("NOT CHECKED: needs 10 GB of free memory\n");
    return 0;
  }
  const size_t bytes = bytes_of(elements);
  Array shadow(bytes), value(bytes);
  Call("cuMemsetD8_v2", shadow.address(), static_cast<unsigned char>(0), bytes);
  Call("cuMemsetD8_v2", value.address(), static_cast<unsigned char>(0x3c),
       bytes);
  Update update;
  update.sources = {{1, Number::kBfloat16}};
  update.targets = {{1, Number::kBfloat16}};
  update.arrays = 2;
  update.elements = {elements};
  update.addresses = {value.address(), shadow.address()};
  Run(update);
  Wait();
  const std::vector<char> got = shadow.Read();
  const uint64_t copied = std::count(got.begin(), got.end(), 0x3c);
  const bool right =
      copied == 2 * elements &&
      std::count(got.end() - kSpace, got.end(), 0) == kSpace;
  std::printf("%s: %llu of %llu bytes\n", right ? "right" : "WRONG",
              static_cast<unsigned long long>(copied),
              static_cast<unsigned long long>(2 * elements));
  return right ? 0 : 1;
}

}  // namespace
}  // namespace gpu
}  // namespace wrapopt

int main() {
  wrapopt::gpu::Start();
  return wrapopt::gpu::CheckHuge();
}
