// Weighted sums of arrays, rounded once.
#include "cc/engine/checkpoint_sums.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "cc/engine/isa.h"
#include "tests/cc/arrays.h"

namespace wrapopt {
namespace {

// To nearest, ties to even, by the definition of the format: `bits` of mantissa
// with the leading one, and a least exponent.
double RoundTo(Number number, double x) {
  int bits = 53, least = -1074, most = 1024;
  if (number == Number::kHalf) bits = 11, least = -24, most = 16;
  if (number == Number::kBfloat16) bits = 8, least = -133, most = 128;
  if (number == Number::kFloat) bits = 24, least = -149, most = 128;
  if (number == Number::kDouble || !std::isfinite(x) || x == 0) return x;
  int exponent;
  std::frexp(x, &exponent);
  const int last = std::max(exponent - bits, least);
  const double rounded =
      std::ldexp(std::nearbyint(std::ldexp(x, -last)), last);
  return std::abs(rounded) >= std::ldexp(1, most)
             ? std::copysign(INFINITY, rounded)
             : rounded;
}

void Compare(const std::vector<Number>& inputs, Number output, size_t size,
             size_t begin, size_t end, Isa isa, Random* random) {
  std::vector<Array> arrays;
  for (size_t i = 0; i < inputs.size(); ++i) {
    arrays.push_back(
        Numbers(size, inputs[i], random, i + 1, kSubnormals));
  }
  for (const bool is_first : {false, true}) {
    for (const bool has_sums : {true, !is_first}) {
      const Array sums = Numbers(size, Number::kDouble, random, 1);
      const Array want_sums = sums;
      const Array got = Numbers(size, output, random, 3), want = got;
      CheckpointSums work{{},
                          is_first,
                          has_sums ? sums.as<double>() : nullptr,
                          got.data(),
                          output};
      for (size_t i = 0; i < inputs.size(); ++i) {
        work.inputs.push_back({arrays[i].data(), inputs[i], 0.3 + 0.2 * i});
      }
      work.Run(begin, end, isa);
      for (size_t e = begin; e < end; ++e) {
        double total = is_first ? 0 : want_sums.as<double>()[e];
        for (size_t i = 0; i < inputs.size(); ++i) {
          const double more =
              work.inputs[i].weight * Get(arrays[i], inputs[i], e);
          total = is_first && i == 0 ? more : total + more;
        }
        if (has_sums) want_sums.as<double>()[e] = total;
        Set(want, output, e, RoundTo(output, total));
      }
      const std::string where = "elements " + std::to_string(begin) + " to " +
                                std::to_string(end);
      ExpectSame(sums, want_sums, Number::kDouble, "sums of " + where);
      ExpectSame(got, want, output, "output of " + where);
    }
  }
}

class CheckpointSumsOn : public testing::TestWithParam<Isa> {};

INSTANTIATE_TEST_SUITE_P(
    Isas, CheckpointSumsOn, testing::ValuesIn(SupportedIsas()),
    [](const auto& info) {
      std::string name = kIsaNames[static_cast<int>(info.param)];
      std::replace(name.begin(), name.end(), '-', '_');
      return name;
    });

TEST_P(CheckpointSumsOn, EachLength) {
  Random random(17);
  for (const Number number : kNumbers) {
    for (size_t size = 0; size <= 300; ++size) {
      Compare({number, Number::kFloat}, number, size, 0, size, GetParam(),
              &random);
    }
  }
}

TEST_P(CheckpointSumsOn, EachPairOfNumbers) {
  Random random(18);
  for (const Number input : kNumbers) {
    for (const Number output : kNumbers) {
      Compare({input}, output, 1000, 0, 1000, GetParam(), &random);
      Compare({input, Number::kDouble, Number::kHalf}, output, 777, 13, 700,
              GetParam(), &random);
    }
  }
}

// Blocks have 2048 elements.
TEST_P(CheckpointSumsOn, EndsOfBlocks) {
  Random random(19);
  for (const size_t begin : {0, 1, 2048}) {
    for (const size_t elements : {2047, 2048, 2049, 5000}) {
      Compare({Number::kBfloat16, Number::kFloat}, Number::kBfloat16,
              begin + elements + 3, begin, begin + elements, GetParam(),
              &random);
    }
  }
}

TEST_P(CheckpointSumsOn, RangesWithoutOutput) {
  Random random(20);
  const Array input = Numbers(5000, Number::kFloat, &random);
  const Array sums(5000 * sizeof(double));
  const CheckpointSums work{{{input.data(), Number::kFloat, 0.5}},
                            true,
                            sums.as<double>(),
                            nullptr,
                            Number::kFloat};
  work.Run(0, 1, GetParam());
  work.Run(2500, 5000, GetParam());
  work.Run(1, 2500, GetParam());
  for (size_t e = 0; e < 5000; ++e) {
    ASSERT_EQ(sums.as<double>()[e], 0.5 * Get(input, Number::kFloat, e));
  }
}

}  // namespace
}  // namespace wrapopt
