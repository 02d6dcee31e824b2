// The memory bandwidth of this machine: what the benchmarks hold the ops
// against.
#ifndef WRAPOPT_CC_PYTHON_STREAM_LIMIT_H_
#define WRAPOPT_CC_PYTHON_STREAM_LIMIT_H_

#include <cstddef>
#include <vector>

namespace wrapopt {

// Threads that go once over float32 arrays and only add.
class StreamLimit {
 public:
  // Arrays of one size: those that are read are added to each that is written.
  struct Arrays {
    size_t size;
    std::vector<const float*> read;
    std::vector<float*> written;
  };

  explicit StreamLimit(std::vector<Arrays> arrays);

  // Seconds for one pass over everything by `threads` threads. Throws
  // std::invalid_argument unless that is positive.
  double Run(int threads) const;

  // Bytes that one pass moves.
  size_t bytes() const;

 private:
  // Goes over the elements [begin, end) of all arrays, one after another.
  void Pass(size_t begin, size_t end) const;

  std::vector<Arrays> arrays_;
  size_t elements_ = 0;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_PYTHON_STREAM_LIMIT_H_
