#include "cc/gpu/check/operands.h"

#include <algorithm>
#include <cstdio>
#include <random>

namespace wrapopt {
namespace gpu {

void Put(Number number, char* to, double x) {
  switch (number) {
    case Number::kHalf:
      return Store(*reinterpret_cast<Half*>(to), static_cast<float>(x));
    case Number::kBfloat16:
      return Store(*reinterpret_cast<Bfloat16*>(to), static_cast<float>(x));
    case Number::kFloat:
      return Store(*reinterpret_cast<float*>(to), static_cast<float>(x));
    case Number::kDouble:
      return Store(*reinterpret_cast<double*>(to), x);
  }
}

double Get(Number number, const char* from) {
  switch (number) {
    case Number::kHalf:
      return Load(*reinterpret_cast<const Half*>(from));
    case Number::kBfloat16:
      return Load(*reinterpret_cast<const Bfloat16*>(from));
    case Number::kFloat:
      return *reinterpret_cast<const float*>(from);
    case Number::kDouble:
      return *reinterpret_cast<const double*>(from);
  }
  return 0;
}

double EpsilonOf(Number number) {
  switch (number) {
    case Number::kHalf:
      return 0x1p-10;
    case Number::kBfloat16:
      return 0x1p-7;
    case Number::kFloat:
      return 0x1p-23;
    case Number::kDouble:
      return 0x1p-52;
  }
  return 0;
}

const std::vector<double>& SomeNumbers() {
  static const auto* const numbers = [] {
    auto* const drawn = new std::vector<double>(65521);
    std::uniform_real_distribution<double> uniform(0.6, 1);
    for (double& x : *drawn) {
      x = uniform(generator) * (generator() % 2 ? -1 : 1);
    }
    return drawn;
  }();
  return *numbers;
}

bool IsEqual(const Operand& operand, const std::string& what) {
  const std::vector<char> got = operand.device.Read();
  if (got == operand.host) return true;
  const size_t at =
      std::mismatch(got.begin(), got.end(), operand.host.begin()).first -
      got.begin();
  std::printf("  WRONG: %s, first at element %zu of %zu\n", what.c_str(),
              at / SizeOf(operand.number),
              got.size() / SizeOf(operand.number));
  return false;
}

Doubles ReadDoubles(const Layout& layout,
                    const std::vector<std::unique_ptr<Operand>>& operands,
                    bool from_device) {
  Doubles result;
  for (const auto& operand : operands) {
    const std::vector<char> data =
        from_device ? operand->device.Read() : operand->host;
    result.emplace_back().reserve(layout.total);
    for (size_t v = 0; v < layout.sizes.size(); ++v) {
      for (uint64_t i = 0; i < layout.sizes[v]; ++i) {
        result.back().push_back(
            Get(operand->number, data.data() + (layout.begins[v] + i) *
                                                   SizeOf(operand->number)));
      }
    }
  }
  return result;
}

std::vector<uint64_t> FewSizes() {
  return {0, 1, 3, 4, 7, 8, 9, 1023, 1024, 1025, 2047, 2048, 2049, 200001};
}

std::vector<uint64_t> ManySizes(int more) {
  std::vector<uint64_t> sizes = FewSizes();
  for (int i = 0; i < more; ++i) sizes.push_back(1 + generator() % 300);
  return sizes;
}

}  // namespace gpu
}  // namespace wrapopt
