// Measures the memory bandwidth of this machine, the limit of the ops in the
// benchmarks: the C function of wrapopt/bench/stream_limit.py.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <thread>
#include <vector>

namespace wrapopt {
namespace {

#if defined(__x86_64__)
#define WRAPOPT_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define WRAPOPT_CLONES
#endif

// Blocks of 2 KiB of each array were the fastest of 256 bytes to 64 KiB, by a
// quarter with many arrays: all stay in the first-level cache, so each array is
// read from memory once, and the prefetchers handle few arrays at a time.
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

// Arrays of one size. Each of `read` is added to each of `written`.
struct Arrays {
  size_t size;
  std::vector<const float*> read;
  std::vector<float*> written;
};

// Processes the elements [begin, end) of all arrays in sequence.
void Pass(const std::vector<Arrays>& arrays, size_t begin, size_t end) {
  size_t first = 0;  // The number of the array's first element.
  for (const Arrays& a : arrays) {
    if (first >= end) return;
    if (first + a.size > begin) {
      StreamLoop(a.read, a.written, std::max(begin, first) - first,
                 std::min(end - first, a.size));
    }
    first += a.size;
  }
}

}  // namespace
}  // namespace wrapopt

// Seconds for one pass by `threads` threads, at least one, over `count` columns
// of float32 arrays. read[r * count + i] and written[w * count + i] have
// sizes[i] elements.
extern "C" __attribute__((visibility("default"))) double wrapopt_stream_pass(
    size_t count, const size_t* sizes, size_t reads, const float* const* read,
    size_t writes, float* const* written, int threads) {
  std::vector<wrapopt::Arrays> arrays(count);
  size_t elements = 0;
  for (size_t i = 0; i < count; ++i) {
    arrays[i].size = sizes[i];
    elements += sizes[i];
    for (size_t r = 0; r < reads; ++r) {
      arrays[i].read.push_back(read[r * count + i]);
    }
    for (size_t w = 0; w < writes; ++w) {
      arrays[i].written.push_back(written[w * count + i]);
    }
  }
  // Each thread takes the next range, so that all end at the same time. With a
  // fixed half of the arrays for each thread, one would wait for the other, and
  // both would use the same banks of memory if a half is a power of two long.
  constexpr size_t kRange = size_t{1} << 16;
  std::atomic<size_t> next{0};
  auto part = [&] {
    for (;;) {
      const size_t begin = next.fetch_add(kRange);
      if (begin >= elements) return;
      wrapopt::Pass(arrays, begin, std::min(begin + kRange, elements));
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
