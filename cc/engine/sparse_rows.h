// The gradients of a sparse gradient, sorted by row. Does not depend on
// TensorFlow.
#ifndef WRAPOPT_CC_ENGINE_SPARSE_ROWS_H_
#define WRAPOPT_CC_ENGINE_SPARSE_ROWS_H_

#include <cstdint>
#include <memory>

#include "cc/engine/elementwise.h"
#include "cc/engine/threads.h"

namespace wrapopt {

// Gradients of one row keep the order of the input, and are summed in that
// order. So the number of threads does not change the bits of a result.
class SparseRows {
 public:
  // Sorts `count` indices, of int32 or int64. All must be in [0, rows). If one
  // is not, this sorts nothing and returns the first such index, which lives as
  // long as this object. Else it returns nullptr.
  template <class Index>
  const RowGrad* Sort(const Threads& threads, const Index* indices,
                      int64_t count, int64_t rows);

  int64_t size() const { return size_; }
  const RowGrad& operator[](int64_t j) const { return grads_[j]; }

  // Whether gradient `j` is the first of its row.
  bool BeginsRow(int64_t j) const {
    return j == 0 || grads_[j].row != grads_[j - 1].row;
  }
  // One past the last gradient of the row of `j`.
  int64_t EndOfRow(int64_t j) const {
    const int64_t row = grads_[j].row;
    while (++j < size_ && grads_[j].row == row) {
    }
    return j;
  }
  // The first gradient of `row` or of a row after it.
  int64_t Find(int64_t row) const;

  // Whether some row has several gradients.
  bool repeat() const { return repeat_; }

 private:
  int64_t size_ = 0;
  std::unique_ptr<RowGrad[]> grads_;
  bool repeat_ = false;
};

// Several different rows that are prefetched together and then updated.
struct RowGroup {
  static constexpr int64_t kMost = 8;
  int64_t count = 0;
  int64_t rows[kMost];
  // Row k has gradients [begin[k], begin[k + 1]).
  int64_t begin[kMost + 1];
};

// Calls work(group) for groups of the rows whose first gradient is in [begin,
// end). Calls prefetch(group) for each group some groups before work(group).
template <class Work, class Prefetch>
void ForGroups(const SparseRows& sorted, int64_t begin, int64_t end,
               const Prefetch& prefetch, const Work& work) {
  constexpr int kAhead = 2;  // Groups between the prefetch and the work.
  RowGroup groups[kAhead + 1];
  while (begin < end && !sorted.BeginsRow(begin)) ++begin;
  for (int at = -kAhead;; ++at) {
    RowGroup& next = groups[(at + kAhead) % (kAhead + 1)];
    for (next.count = 0; begin < end && next.count < RowGroup::kMost;) {
      next.rows[next.count] = sorted[begin].row;
      next.begin[next.count++] = begin;
      begin = sorted.EndOfRow(begin);
    }
    next.begin[next.count] = begin;
    prefetch(next);
    if (at < 0) continue;
    const RowGroup& group = groups[at % (kAhead + 1)];
    if (group.count == 0) return;
    work(group);
  }
}

}  // namespace wrapopt

#endif  // WRAPOPT_CC_ENGINE_SPARSE_ROWS_H_
