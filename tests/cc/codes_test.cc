// The loops of codes, for all kinds, types of values and instruction sets of
// this processor: they give the bits of plain loops, and touch no element but
// theirs.
#include "cc/engine/codes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cc/engine/isa.h"
#include "cc/engine/number.h"
#include "cc/engine/subnormals.h"
#include "tests/cc/arrays.h"

namespace wrapopt {
namespace {

constexpr Code kCodes[] = {Code::kBfloat16, Code::kInt8, Code::kInt4};

class Codes : public testing::TestWithParam<Isa> {};

INSTANTIATE_TEST_SUITE_P(
    Isas, Codes, testing::ValuesIn(SupportedIsas()), [](const auto& info) {
      std::string name = kIsaNames[static_cast<int>(info.param)];
      std::replace(name.begin(), name.end(), '-', '_');
      return name;
    });

// One number after the other. Leaves the decoded numbers in y.
void Reference(Code kind, const std::vector<float>& x, const Array& code,
               std::vector<float>* y) {
  char* to = code.as<char>();
  y->resize(x.size());
  for (size_t begin = 0; begin < x.size(); begin += kCodeBlock) {
    const size_t end = std::min(begin + kCodeBlock, x.size());
    if (kind == Code::kBfloat16) {
      for (size_t i = begin; i < end; ++i, to += 2) {
        Bfloat16 number;
        Store(number, x[i]);
        std::memcpy(to, &number, 2);
        (*y)[i] = Load(number);
      }
      continue;
    }
    const bool is_half = kind == Code::kInt4;
    float max = 0;
    for (size_t i = begin; i < end; ++i) {
      max = std::isnan(x[i]) || std::isnan(max)
                ? NAN
                : std::max(max, std::fabs(x[i]));
    }
    const float scale = std::isfinite(max) ? max / (is_half ? 7 : 127) : NAN;
    std::memcpy(to, &scale, sizeof(scale));
    to += sizeof(scale);
    for (size_t i = begin; i < end; ++i) {
      const int number =
          scale > 0 ? static_cast<int>(std::nearbyint(x[i] / scale)) : 0;
      (*y)[i] = static_cast<float>(number) * scale;
      if (!is_half) {
        *to++ = static_cast<char>(number);
      } else if ((i - begin) % 2 == 0) {
        *to++ = static_cast<char>(number & 15);
      } else {
        to[-1] = static_cast<char>(to[-1] | (number & 15) << 4);
      }
    }
  }
  EXPECT_EQ(to, code.as<char>() + code.bytes());
}

void Compare(Code kind, Number number, Isa isa, size_t size, size_t offset,
             bool has_center, bool in_place, int specials, Random* random) {
  const std::string where = std::string(kCodeNames[static_cast<int>(kind)]) +
                            " of " + std::to_string(size);
  const Array values = Numbers(size, number, random, offset, specials);
  const Array center =
      Numbers(size, Number::kFloat, random, 2 * offset, specials);
  const Array error =
      Numbers(size, Number::kFloat, random, 3 * offset, specials);
  const Array code(CodeBytes(kind, size), offset);
  const Array want_code(CodeBytes(kind, size));
  const Array left =
      in_place ? error : Array(size * sizeof(float), offset * sizeof(float));
  const Array moved(size * sizeof(float)), want(size * sizeof(float));
  std::vector<float> x(size), y;
  {
    const FlushSubnormals flush;
    for (size_t i = 0; i < size; ++i) {
      const float value = static_cast<float>(Get(values, number, i));
      x[i] = (has_center ? value - center.as<float>()[i] : value) +
             error.as<float>()[i];
    }
    Reference(kind, x, want_code, &y);
    for (size_t i = 0; i < size; ++i) want.as<float>()[i] = x[i] - y[i];
  }
  FindEncode(kind, number, isa)(
      values.data(), has_center ? center.as<float>() : nullptr,
      (in_place ? left : error).as<float>(), size, code.data(),
      left.as<float>());
  ExpectSame(left, want, Number::kFloat, where + ": errors");
  // The bits of a NaN are those of the scale.
  for (size_t i = 0; kind == Code::kBfloat16 && i < size; ++i) {
    if (!std::isnan(y[i])) continue;
    std::memcpy(code.as<char>() + 2 * i, want_code.as<char>() + 2 * i, 2);
  }
  ASSERT_EQ(std::memcmp(code.data(), want_code.data(), code.bytes()), 0)
      << where;

  const double rate = 0.25;
  for (const double* by : {static_cast<const double*>(nullptr), &rate}) {
    {
      const FlushSubnormals flush;
      for (size_t i = 0; i < size; ++i) {
        const float from = center.as<float>()[i];
        want.as<float>()[i] =
            by == nullptr ? from + y[i] : from + 0.25f * (y[i] - from);
      }
    }
    FindDecode(kind, isa)(center.as<float>(), code.data(), by, size,
                          moved.as<float>());
    ExpectSame(moved, want, Number::kFloat, where + ": decoded");
  }
}

TEST_P(Codes, GiveTheSameBits) {
  Random random(1);
  for (const Code kind : kCodes) {
    for (const Number number : kNumbers) {
      if (number == Number::kDouble) continue;
      for (const size_t size :
           {0, 1, 2, 3, 15, 64, 127, 128, 129, 130, 255, 256, 257, 1000}) {
        for (const size_t offset : {0, 1, 3}) {
          Compare(kind, number, GetParam(), size, offset, offset != 3,
                  offset == 1, kZeros, &random);
        }
      }
    }
  }
}

TEST_P(Codes, OfSpecialNumbers) {
  Random random(2);
  for (const Code kind : kCodes) {
    for (int i = 0; i < 200; ++i) {
      Compare(kind, Number::kFloat, GetParam(), 1 + Below(300, &random), 0,
              i % 2, false, i % 3 ? kSubnormals : 5, &random);
    }
  }
}

TEST_P(Codes, DoNotFlushTheScaleOfTheSmallestNumbers) {
  // 127 * 2^-126 / 127 is normal, and 126 * 2^-126 / 127 is not.
  for (const float most : {127 * 0x1p-126f, 126 * 0x1p-126f}) {
    float values[] = {most, -most / 2}, zeros[2] = {}, left[2];
    char code[6];
    FindEncode(Code::kInt8, Number::kFloat, GetParam())(
        values, nullptr, zeros, 2, code, left);
    EXPECT_EQ(code[4], most == 127 * 0x1p-126f ? 127 : 0);
    EXPECT_EQ(left[0], most == 127 * 0x1p-126f ? 0 : most);
  }
}

TEST(CodesOfDouble, AreNone) {
  EXPECT_EQ(FindEncode(Code::kInt8, Number::kDouble, Isa::kBaseline), nullptr);
}

}  // namespace
}  // namespace wrapopt
