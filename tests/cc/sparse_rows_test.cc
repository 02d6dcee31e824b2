// The sort of sparse gradients by row, and their groups.
#include "cc/engine/sparse_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/cc/arrays.h"
#include "tests/cc/pool.h"

namespace wrapopt {
namespace {

// Indices of which some are repeated, in memory that ends with them.
template <class Index>
Array Indices(int64_t count, int64_t rows, Random* random) {
  const Array indices(count * sizeof(Index), sizeof(Index));
  for (int64_t j = 0; j < count; ++j) {
    const bool repeats = j > 0 && Below(4, random) == 0;
    indices.as<Index>()[j] = repeats
                                 ? indices.as<Index>()[Below(j, random)]
                                 : static_cast<Index>(Below(rows, random));
  }
  return indices;
}

template <class Index>
void SortSome(const Threads& threads, int64_t count, int64_t rows,
              Random* random) {
  const Array indices = Indices<Index>(count, rows, random);
  std::vector<RowGrad> want;
  for (int64_t j = 0; j < count; ++j) {
    want.push_back({indices.as<Index>()[j], j});
  }
  std::stable_sort(
      want.begin(), want.end(),
      [](const RowGrad& a, const RowGrad& b) { return a.row < b.row; });

  SparseRows got;
  ASSERT_EQ(got.Sort(threads, indices.as<Index>(), count, rows), nullptr);
  ASSERT_EQ(got.size(), count);
  bool repeats = false;
  for (int64_t j = 0; j < count; ++j) {
    ASSERT_EQ(got[j].row, want[j].row);
    ASSERT_EQ(got[j].position, want[j].position);
    const bool begins = j == 0 || want[j].row != want[j - 1].row;
    repeats |= !begins;
    ASSERT_EQ(got.BeginsRow(j), begins);
  }
  EXPECT_EQ(got.repeat(), repeats);
  for (int64_t j = 0; j < count; j += 1 + count / 7) {
    const auto [begin, end] = std::equal_range(
        want.begin(), want.end(), want[j],
        [](const RowGrad& a, const RowGrad& b) { return a.row < b.row; });
    EXPECT_EQ(got.Find(want[j].row), begin - want.begin());
    EXPECT_EQ(got.Find(want[j].row + 1), end - want.begin());
    EXPECT_EQ(got.EndOfRow(j), end - want.begin());
  }
  EXPECT_EQ(got.Find(0), 0);
  EXPECT_EQ(got.Find(rows), count);
}

TEST(SparseRows, AreSortedAndKeepTheirOrder) {
  Random random(8);
  for (const int threads : {0, 1, 4}) {
    const Pool pool(threads);
    for (const int64_t rows :
         {int64_t{1}, int64_t{2}, int64_t{3}, int64_t{511}, int64_t{512},
          int64_t{513}, int64_t{1} << 18, (int64_t{1} << 18) + 1,
          int64_t{std::numeric_limits<int32_t>::max()}, int64_t{1} << 40,
          std::numeric_limits<int64_t>::max()}) {
      for (const int64_t count : {0, 1, 2, 3, 17, 1000}) {
        SortSome<int64_t>(pool, count, rows, &random);
        if (rows <= std::numeric_limits<int32_t>::max()) {
          SortSome<int32_t>(pool, count, rows, &random);
        }
      }
    }
    // Several chunks, which the threads share.
    for (const int64_t count : {16384, 32767, 70001}) {
      SortSome<int64_t>(pool, count, 5, &random);
      SortSome<int32_t>(pool, count, 1 << 20, &random);
    }
  }
}

TEST(SparseRows, AreAllRowsOfTheVariable) {
  Random random(9);
  const Pool pool(4);
  for (const int64_t count : {1, 5, 70000}) {
    for (const int64_t wrong :
         {int64_t{-1}, int64_t{100}, std::numeric_limits<int64_t>::min(),
          std::numeric_limits<int64_t>::max()}) {
      const Array indices = Indices<int64_t>(count, 100, &random);
      const int64_t first = Below(count, &random);
      for (int64_t j = first; j < count; j += 1 + count / 9) {
        indices.as<int64_t>()[j] = wrong;
      }
      SparseRows rows;
      const RowGrad* bad =
          rows.Sort(pool, indices.as<int64_t>(), count, 100);
      ASSERT_NE(bad, nullptr);
      EXPECT_EQ(bad->position, first);
      EXPECT_EQ(bad->row, wrong);
    }
  }
  // A variable without rows.
  SparseRows rows;
  const int32_t zero = 0;
  EXPECT_NE(rows.Sort(pool, &zero, 1, 0), nullptr);
  EXPECT_EQ(rows.Sort(pool, &zero, 0, 0), nullptr);
  EXPECT_EQ(rows.size(), 0);
}

TEST(SparseRows, AreSortedAgain) {
  const Pool pool(0);
  SparseRows rows;
  const int32_t many[] = {5, 1, 5}, one[] = {3};
  EXPECT_EQ(rows.Sort(pool, many, 3, 6), nullptr);
  EXPECT_TRUE(rows.repeat());
  EXPECT_EQ(rows.Sort(pool, one, 1, 6), nullptr);
  EXPECT_FALSE(rows.repeat());
  EXPECT_EQ(rows.size(), 1);
}

// Each row is in one group of one range of gradients, in that of its first, and
// is prefetched before.
TEST(ForGroups, TakesEachRowOnce) {
  Random random(10);
  const Pool pool(0);
  for (const int64_t count : {0, 1, 7, 8, 9, 16, 17, 24, 25, 500}) {
    for (const int64_t rows : {1, 3, 40, 100000}) {
      SparseRows sorted;
      const Array indices = Indices<int32_t>(count, rows, &random);
      ASSERT_EQ(sorted.Sort(pool, indices.as<int32_t>(), count, rows), nullptr);
      for (const int64_t range : {int64_t{1}, int64_t{5}, count + 1}) {
        std::vector<int64_t> got, prefetched;
        for (int64_t begin = 0; begin <= count; begin += range) {
          ForGroups(
              sorted, begin, std::min(begin + range, count),
              [&](const RowGroup& group) {
                for (int64_t k = 0; k < group.count; ++k) {
                  prefetched.push_back(group.rows[k]);
                }
              },
              [&](const RowGroup& group) {
                ASSERT_GT(group.count, 0);
                ASSERT_LE(group.count, RowGroup::kMost);
                for (int64_t k = 0; k < group.count; ++k) {
                  got.push_back(group.rows[k]);
                  ASSERT_TRUE(sorted.BeginsRow(group.begin[k]));
                  ASSERT_EQ(sorted[group.begin[k]].row, group.rows[k]);
                  ASSERT_EQ(sorted.EndOfRow(group.begin[k]),
                            group.begin[k + 1]);
                }
                ASSERT_GE(prefetched.size(), got.size());
              });
          ASSERT_EQ(prefetched, got);
        }
        std::vector<int64_t> want;
        for (int64_t j = 0; j < count; ++j) {
          if (sorted.BeginsRow(j)) want.push_back(sorted[j].row);
        }
        ASSERT_EQ(got, want);
      }
    }
  }
}

}  // namespace
}  // namespace wrapopt
