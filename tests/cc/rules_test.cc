// The loops of all rules, for all number types and instruction sets of this
// processor: they give the bits of the rule's own step, and touch no element
// but theirs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "cc/engine/elementwise.h"
#include "cc/engine/isa.h"
#include "cc/rules/catch_up.h"
#include "cc/rules/rules.h"
#include "tests/cc/arrays.h"
#include "tests/cc/reference.h"

namespace wrapopt {
namespace {

class Rules : public testing::TestWithParam<Isa> {};

INSTANTIATE_TEST_SUITE_P(
    Isas, Rules, testing::ValuesIn(SupportedIsas()), [](const auto& info) {
      std::string name = kIsaNames[static_cast<int>(info.param)];
      std::replace(name.begin(), name.end(), '-', '_');
      return name;
    });

std::vector<void*> Pointers(const std::vector<Array>& arrays) {
  std::vector<void*> pointers;
  for (const Array& array : arrays) pointers.push_back(array.data());
  return pointers;
}

// Runs elements [begin, end) of arrays of `size` elements, which do not begin
// at a vector's boundary if `offset`.
void Compare(const RuleInfo& rule, Number state, Number input, Isa isa,
             size_t size, size_t begin, size_t end, size_t offset,
             Random* random) {
  const size_t states = CountNames(rule.states);
  std::vector<Array> got, want;
  for (size_t a = 0; a < states + CountNames(rule.inputs); ++a) {
    got.push_back(Numbers(size, a < states ? state : input, random,
                          a * offset % 16, kInfinities));
  }
  want = std::vector<Array>(got.begin(), got.end());
  const std::vector<double> scalars = ScalarsOf(rule, offset % 2);

  FindStep(rule.id, state, input, isa)(Pointers(got).data(), scalars.data(),
                                       begin, end, {size});
  std::vector<void*> from = Pointers(want);
  for (size_t a = 0; a < from.size(); ++a) {
    from[a] = static_cast<char*>(from[a]) +
              begin * SizeOf(a < states ? state : input);
  }
  Reference(rule.id, state, input, from.data(), scalars.data(), end - begin);
  for (size_t a = 0; a < got.size(); ++a) {
    const std::string where = std::string(rule.name) + " array " +
                              std::to_string(a) + " [" + std::to_string(begin) +
                              ", " + std::to_string(end) + ")";
    ExpectSame(got[a], want[a], a < states ? state : input, where);
  }
}

TEST_P(Rules, GiveTheSameBits) {
  Random random(1);
  for (const RuleInfo& rule : kRules) {
    for (const auto& [state, input] : kPairs) {
      for (const size_t size :
           {0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 1000, 1111}) {
        for (const size_t offset : {0, 1, 3}) {
          Compare(rule, state, input, GetParam(), size, 0, size, offset,
                  &random);
        }
      }
    }
  }
}

TEST_P(Rules, ChangeOnlyTheirRange) {
  Random random(2);
  for (const RuleInfo& rule : kRules) {
    for (const auto& [state, input] : kPairs) {
      for (const size_t begin : {1, 5, 64, 512}) {
        for (const size_t end : {begin, begin + 1, begin + 63, begin + 130}) {
          Compare(rule, state, input, GetParam(), end + 70, begin, end, 1,
                  &random);
        }
      }
    }
  }
}

// The least normal number is 1.2e-38. An average of 1e-38 is 0, and one of
// 2e-38 does not move by a result of 0.25e-38.
TEST_P(Rules, FlushSubnormals) {
  for (const size_t size : {1, 2, 100}) {
    const Array shadow(size * sizeof(float)), value(size * sizeof(float));
    for (size_t e = 0; e < size; ++e) {
      shadow.as<float>()[e] = e % 2 ? 2e-38f : 1e-38f;
      value.as<float>()[e] = e % 2 ? 1.5e-38f : 1e-38f;
    }
    const double rate = 0.5;
    void* const operands[] = {shadow.data(), value.data()};
    FindStep(RuleId::kEma, Number::kFloat, Number::kFloat, GetParam())(
        operands, &rate, 0, size, {size});
    for (size_t e = 0; e < size; ++e) {
      EXPECT_EQ(shadow.as<float>()[e], e % 2 ? 2e-38f : 0);
    }
  }
}

TEST_P(Rules, HaveNoLoopForOtherPairs) {
  for (const Number state : kNumbers) {
    for (const Number input : kNumbers) {
      const bool exists =
          std::find(std::begin(kPairs), std::end(kPairs),
                    std::make_pair(state, input)) != std::end(kPairs);
      for (const RuleInfo& rule : kRules) {
        EXPECT_EQ(FindStep(rule.id, state, input, GetParam()) != nullptr,
                  exists);
      }
      EXPECT_EQ(FindMoveRows(state, input, GetParam()) != nullptr, exists);
    }
  }
}

TEST_P(Rules, SumGradientsInTheirOrder) {
  Random random(3);
  for (const Number number : kNumbers) {
    const bool is_double = number == Number::kDouble;
    for (const size_t row : {1, 3, 16, 512, 700}) {
      for (const size_t count : {0, 1, 2, 9, 40}) {
        const size_t rows = count + 3;
        const Array grads = Numbers(rows * row, number, &random, 1);
        std::vector<RowGrad> of_row;
        for (size_t i = 0; i < count; ++i) {
          of_row.push_back({7, Below(rows, &random)});
        }
        const size_t begin = row / 3, end = row - row / 4;
        const Number sum = is_double ? Number::kDouble : Number::kFloat;
        const Array got((end - begin) * SizeOf(sum), SizeOf(sum));
        const Array want = got;
        FindSum(number, GetParam())(got.data(), grads.data(), row,
                                    of_row.data(), count, begin, end);
        for (size_t e = begin; e < end; ++e) {
          double total = 0;
          for (const RowGrad& grad : of_row) {
            total += Get(grads, number, grad.position * row + e);
            if (!is_double) total = static_cast<float>(total);
          }
          Set(want, sum, e - begin, total);
        }
        ExpectSame(got, want, sum, "sum");
      }
    }
  }
}

TEST_P(Rules, MoveRows) {
  Random random(4);
  for (const auto& [state, input] : kPairs) {
    for (const size_t row : {0, 1, 3, 16, 512, 515}) {
      for (const int64_t count : {0, 1, 7, 8, 31, 32, 33, 65}) {
        for (const bool is_step : {false, true}) {
          const int64_t rows = count + 2;
          const Array shadows = Numbers(rows * row, state, &random, 1);
          const Array want = shadows;
          const Array values = Numbers(rows * row, input, &random, 3);
          const Array logs(rows * sizeof(double), sizeof(double));
          for (int64_t r = 0; r < rows; ++r) {
            logs.as<double>()[r] = -1 - 0.25 * (r % 4);
          }
          std::vector<int64_t> some(count);
          for (int64_t r = 0; r < count; ++r) some[r] = rows - 1 - r;
          const double rate = 0.375, now = -2, mark = -2.5;
          FindMoveRows(state, input, GetParam())(
              shadows.data(), values.data(), is_step ? &rate : nullptr,
              is_step ? nullptr : logs.as<double>(), now, mark, row,
              some.data(), count);
          for (int64_t r = 0; r < rows; ++r) {
            const bool moved = r >= 2;
            const double before = -1 - 0.25 * (r % 4);
            EXPECT_EQ(logs.as<double>()[r], moved && !is_step ? mark : before);
            if (!moved) continue;
            const double by = is_step ? rate : CatchUp::Rate(now - before);
            void* const operands[] = {
                want.as<char>() + r * row * SizeOf(state),
                values.as<char>() + r * row * SizeOf(input)};
            Reference(RuleId::kEma, state, input, operands, &by, row);
          }
          ExpectSame(shadows, want, state, "shadows");
        }
      }
    }
  }
}

// To two units in the last place.
TEST(Maths, OneMinusExp) {
  for (double x = 0; x > -45; x = x * 1.01 - 1e-12) {
    const double want = -std::expm1(x);
    EXPECT_NEAR(OneMinusExp(x), want, 0x1p-51 * want) << x;
  }
  EXPECT_EQ(OneMinusExp(0), 0);
  EXPECT_EQ(OneMinusExp(-1e300), 1);
  EXPECT_EQ(OneMinusExp(-INFINITY), 1);
}

TEST(IsaNames, AreThoseOfThisProcessor) {
  Isa isa;
  std::string error;
  for (const Isa supported : SupportedIsas()) {
    EXPECT_TRUE(
        IsaFromName(kIsaNames[static_cast<int>(supported)], &isa, &error));
    EXPECT_EQ(isa, supported);
  }
  EXPECT_TRUE(IsaFromName("", &isa, &error));
  EXPECT_EQ(isa, SupportedIsas().back());
  EXPECT_FALSE(IsaFromName("sse9", &isa, &error));
  EXPECT_EQ(error.substr(error.size() - 10), "got 'sse9'");
}

}  // namespace
}  // namespace wrapopt
