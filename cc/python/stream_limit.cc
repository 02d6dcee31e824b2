#include "cc/python/stream_limit.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace wrapopt {
namespace {

#if defined(__x86_64__)
#define WRAPOPT_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define WRAPOPT_CLONES
#endif

// A block of 2 KiB of each array at a time was fastest of 256 bytes to 64 KiB,
// by a quarter where there are many arrays: all stay in the first-level cache,
// so that memory sees each array once and the prefetchers see few at a time.
WRAPOPT_CLONES void StreamLoop(const std::vector<const float*>& read,
                               const std::vector<float*>& written, size_t begin,
                               size_t end) {
  constexpr size_t kBlock = 512;
  for (size_t from = begin; from < end; from += kBlock) {
    const size_t to = std::min(from + kBlock, end);
    for (float* const w : written) {
      for (const float* const r : read) {
#pragma GCC ivdep
        for (size_t j = from; j < to; ++j) w[j] += r[j];
      }
    }
  }
}

}  // namespace

StreamLimit::StreamLimit(std::vector<Arrays> arrays)
    : arrays_(std::move(arrays)) {
  for (const Arrays& a : arrays_) elements_ += a.size;
}

size_t StreamLimit::bytes() const {
  size_t bytes = 0;
  for (const Arrays& a : arrays_) {
    bytes += a.size * sizeof(float) * (a.read.size() + 2 * a.written.size());
  }
  return bytes;
}

double StreamLimit::Run(int threads) const {
  if (threads < 1) {
    throw std::invalid_argument("threads must be at least 1, got " +
                                std::to_string(threads));
  }
  // Each thread takes the next range, so that all are done at one time. One
  // that has its own half of the arrays waits for the other, and the two meet
  // in the same banks of memory wherever a half is a power of two long.
  constexpr size_t kRange = size_t{1} << 16;
  std::atomic<size_t> next{0};
  auto part = [&] {
    for (;;) {
      const size_t begin = next.fetch_add(kRange);
      if (begin >= elements_) return;
      Pass(begin, std::min(begin + kRange, elements_));
    }
  };
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(part);
  part();
  for (std::thread& t : others) t.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
      .count();
}

void StreamLimit::Pass(size_t begin, size_t end) const {
  size_t first = 0;  // Of the array, among all elements.
  for (const Arrays& a : arrays_) {
    if (first >= end) return;
    if (first + a.size > begin) {
      StreamLoop(a.read, a.written, std::max(begin, first) - first,
                 std::min(end - first, a.size));
    }
    first += a.size;
  }
}

}  // namespace wrapopt
