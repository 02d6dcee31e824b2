#include "cc/engine/sparse_rows.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace wrapopt {
namespace {

// Divides the gradients into chunks, which the threads share.
class Chunks {
 public:
  Chunks(const Threads& threads, int64_t size)
      : threads_(threads),
        size_(size),
        // A pool without threads counts 0: the caller's thread does the work.
        count_(std::clamp<int64_t>(size / kSize, 1,
                                   std::max<int64_t>(1, threads.count()))) {}

  int64_t count() const { return count_; }

  // Calls work(chunk, begin, end) for each chunk.
  template <class Work>
  void ForEach(const Work& work) const {
    constexpr int64_t kCyclesPerGrad = 15;
    RunParallel(threads_, count_, kCyclesPerGrad * size_ / count_,
                [&](int64_t begin, int64_t end) {
                  for (int64_t c = begin; c < end; ++c) {
                    work(c, c * size_ / count_, (c + 1) * size_ / count_);
                  }
                });
  }

 private:
  static constexpr int64_t kSize = 16384;  // The least, if there are several.

  const Threads& threads_;
  const int64_t size_;
  const int64_t count_;
};

// Reads the indices into `grads`. Returns the first gradient whose row is not
// in [0, rows), or nullptr.
template <class Index>
const RowGrad* Read(const Chunks& chunks, const Index* indices, int64_t rows,
                    RowGrad* grads) {
  std::vector<const RowGrad*> bad(chunks.count());
  chunks.ForEach([&](int64_t chunk, int64_t begin, int64_t end) {
    for (int64_t j = end; j-- > begin;) {
      // Read once, so that the checked value is the used one: another op may
      // write the buffer of the indices if it is also that of a variable.
      const int64_t row = *static_cast<const volatile Index*>(indices + j);
      grads[j] = {row, j};
      if (row < 0 || row >= rows) bad[chunk] = &grads[j];
    }
  });
  for (const RowGrad* grad : bad) {
    if (grad != nullptr) return grad;
  }
  return nullptr;
}

// One pass of a radix sort: sorts by one digit, which is `bits` bits of the row
// from bit `shift` on.
void SortByDigit(const Chunks& chunks, int shift, int bits,
                 const RowGrad* from, RowGrad* to) {
  const int64_t digits = int64_t{1} << bits;
  auto digit = [=](int64_t j) {
    return (from[j].row >> shift) & (digits - 1);
  };
  // For each chunk and digit: first the number of gradients, then the place of
  // the next gradient.
  std::vector<int64_t> places(chunks.count() * digits);
  chunks.ForEach([&](int64_t chunk, int64_t begin, int64_t end) {
    int64_t* const count = &places[chunk * digits];
    for (int64_t j = begin; j < end; ++j) ++count[digit(j)];
  });
  int64_t next = 0;
  for (int64_t d = 0; d < digits; ++d) {
    for (int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
      int64_t& place = places[chunk * digits + d];
      next += std::exchange(place, next);
    }
  }
  chunks.ForEach([&](int64_t chunk, int64_t begin, int64_t end) {
    int64_t* const place = &places[chunk * digits];
    for (int64_t j = begin; j < end; ++j) to[place[digit(j)]++] = from[j];
  });
}

}  // namespace

template <class Index>
const RowGrad* SparseRows::Sort(const Threads& threads, const Index* indices,
                                int64_t count, int64_t rows) {
  size_ = count;
  // Not a vector, which would write zeros first.
  grads_.reset(new RowGrad[size_]);
  const Chunks chunks(threads, size_);
  if (const RowGrad* bad = Read(chunks, indices, rows, grads_.get())) {
    return bad;
  }

  int bits = 0;
  while (bits < 63 && (rows - 1) >> bits > 0) ++bits;
  // With more bits in a digit, the places that a pass writes to would not fit
  // into the first-level cache.
  constexpr int kBits = 9;
  const int passes = (bits + kBits - 1) / kBits;
  std::unique_ptr<RowGrad[]> other(new RowGrad[passes == 0 ? 0 : size_]);
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = bits * pass / passes;
    SortByDigit(chunks, shift, bits * (pass + 1) / passes - shift,
                grads_.get(), other.get());
    grads_.swap(other);
  }
  int64_t j = 1;
  while (j < size_ && BeginsRow(j)) ++j;
  repeat_ = j < size_;
  return nullptr;
}

template const RowGrad* SparseRows::Sort(const Threads& threads,
                                         const int32_t* indices, int64_t count,
                                         int64_t rows);
template const RowGrad* SparseRows::Sort(const Threads& threads,
                                         const int64_t* indices, int64_t count,
                                         int64_t rows);

int64_t SparseRows::Find(int64_t row) const {
  return std::lower_bound(grads_.get(), grads_.get() + size_, row,
                          [](const RowGrad& grad, int64_t row) {
                            return grad.row < row;
                          }) -
         grads_.get();
}

}  // namespace wrapopt
