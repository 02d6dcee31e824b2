// The memory bandwidth of this machine: what the benchmarks hold the ops
// against.
#ifndef WRAPOPT_CC_PYTHON_STREAM_LIMIT_H_
#define WRAPOPT_CC_PYTHON_STREAM_LIMIT_H_

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <vector>

namespace wrapopt {

// Threads that go once over `reads` read-only and `writes` read-and-written
// float32 arrays for each of `sizes`, and only add.
class StreamLimit {
 public:
  // Throws std::invalid_argument for numbers of arrays that it has no loop for.
  StreamLimit(std::vector<size_t> sizes, size_t reads, size_t writes);

  // Seconds for one pass over everything by `threads` threads.
  double Run(int threads);

  // Bytes that one pass moves.
  size_t bytes() const {
    return elements_ * sizeof(float) * (reads_ + 2 * writes_);
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  using Buffer = std::unique_ptr<float, Free>;

  static Buffer Allocate(size_t elements);
  // Goes over the elements [begin, end) of all arrays, one after another.
  void Pass(size_t begin, size_t end) const;

  std::vector<size_t> sizes_;
  size_t reads_;
  size_t writes_;
  size_t elements_ = 0;
  std::vector<Buffer> buffers_;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_PYTHON_STREAM_LIMIT_H_
