// Arrays of random numbers, on the host and on the device.
#ifndef WRAPOPT_CC_GPU_CHECK_OPERANDS_H_
#define WRAPOPT_CC_GPU_CHECK_OPERANDS_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cc/engine/number.h"
#include "cc/gpu/check/device.h"

namespace wrapopt {
namespace gpu {

void Put(Number number, char* to, double x);
double Get(Number number, const char* from);

// From 1 to the next number.
double EpsilonOf(Number number);

// Arrays of many variables in one buffer, with gaps that no kernel may change.
// Some are not aligned to 16 bytes.
struct Layout {
  explicit Layout(const std::vector<uint64_t>& sizes) : sizes(sizes) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      total = (total + 63) / 64 * 64 + 64 + (i % 5 == 4 ? 1 + i % 7 : 0);
      begins.push_back(total);
      total += sizes[i];
    }
    total += 64;
  }

  std::vector<uint64_t> sizes;
  std::vector<uint64_t> begins;
  uint64_t total = 0;
};

// Random numbers between 0.6 and 1, of both signs. Their number is a prime: so
// arrays that repeat them do not do so with a table's or a chunk's rhythm.
const std::vector<double>& SomeNumbers();

struct Operand {
  // Numbers from which no rule computes a NaN, whose bits depend on the
  // processor.
  Operand(const Layout& layout, Number number, bool has_signs)
      : number(number),
        host(layout.total * SizeOf(number)),
        device(host.size()) {
    const std::vector<double>& numbers = SomeNumbers();
    uint64_t next = generator() % numbers.size();
    for (uint64_t i = 0; i < layout.total; ++i) {
      const double x = numbers[next];
      if (++next == numbers.size()) next = 0;
      Put(number, host.data() + i * SizeOf(number),
          has_signs ? x : std::abs(x));
    }
    device.Write(host);
  }

  const Number number;
  std::vector<char> host;
  Array device;
};

// Compares all bytes, also those of the gaps.
bool IsEqual(const Operand& operand, const std::string& what);

// Operands in double, without the gaps.
using Doubles = std::vector<std::vector<double>>;

Doubles ReadDoubles(const Layout& layout,
                    const std::vector<std::unique_ptr<Operand>>& operands,
                    bool from_device);

// Sizes below, at and above the numbers of a thread, a block and a chunk.
std::vector<uint64_t> FewSizes();

// These, and `more` random sizes.
std::vector<uint64_t> ManySizes(int more);

}  // namespace gpu
}  // namespace wrapopt

#endif  // WRAPOPT_CC_GPU_CHECK_OPERANDS_H_
