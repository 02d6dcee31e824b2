#include "cc/python/stream_limit.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>
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

constexpr size_t kMaxReads = 2;

// Adds `reads` to each of `writes`: as little arithmetic as can be had for one
// pass over that many arrays. A block of 2 KiB of each array at a time was
// fastest of 256 bytes to 64 KiB, by a quarter where there are many arrays:
// all stay in the first-level cache, so that memory sees each array once and
// the prefetchers see few at a time.
WRAPOPT_CLONES void StreamLoop(const std::vector<float*>& reads,
                               const std::vector<float*>& writes, size_t begin,
                               size_t end) {
  constexpr size_t kBlock = 512;
  const float* const a = reads.size() > 0 ? reads[0] : nullptr;
  const float* const b = reads.size() > 1 ? reads[1] : nullptr;
  for (size_t from = begin; from < end; from += kBlock) {
    const size_t to = std::min(from + kBlock, end);
    for (float* const w : writes) {
      if (b != nullptr) {
#pragma GCC ivdep
        for (size_t j = from; j < to; ++j) w[j] += a[j] + b[j];
      } else if (a != nullptr) {
#pragma GCC ivdep
        for (size_t j = from; j < to; ++j) w[j] += a[j];
      } else {
#pragma GCC ivdep
        for (size_t j = from; j < to; ++j) w[j] += 1.0f;
      }
    }
  }
}

}  // namespace

StreamLimit::StreamLimit(std::vector<size_t> sizes, size_t reads, size_t writes)
    : sizes_(std::move(sizes)), reads_(reads), writes_(writes) {
  if (reads > kMaxReads || writes == 0) {
    throw std::invalid_argument("at most " + std::to_string(kMaxReads) +
                                " reads and at least 1 write, got " +
                                std::to_string(reads) + " and " +
                                std::to_string(writes));
  }
  for (const size_t size : sizes_) {
    for (size_t k = 0; k < reads_ + writes_; ++k) {
      buffers_.push_back(Allocate(size));
      std::fill_n(buffers_.back().get(), size, 0.0f);
    }
    elements_ += size;
  }
}

// As TensorFlow allocates a tensor: aligned, and no request for huge pages.
StreamLimit::Buffer StreamLimit::Allocate(size_t elements) {
  void* p = nullptr;
  if (posix_memalign(&p, 64, std::max<size_t>(elements, 1) * sizeof(float))) {
    throw std::bad_alloc();
  }
  return Buffer(static_cast<float*>(p));
}

double StreamLimit::Run(int threads) {
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
  std::vector<float*> reads(reads_), writes(writes_);
  auto buffer = buffers_.begin();
  size_t first = 0;  // Of the array, among all elements.
  for (const size_t size : sizes_) {
    if (first >= end) return;
    if (first + size > begin) {
      auto p = buffer;
      for (float*& read : reads) read = (p++)->get();
      for (float*& write : writes) write = (p++)->get();
      StreamLoop(reads, writes, std::max(begin, first) - first,
                 std::min(end - first, size));
    }
    first += size;
    buffer += reads_ + writes_;
  }
}

}  // namespace wrapopt
