// Arrays for tests of loops: they end where their memory ends.
#ifndef WRAPOPT_TESTS_CC_ARRAYS_H_
#define WRAPOPT_TESTS_CC_ARRAYS_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <string>

#include "cc/engine/isa.h"
#include "cc/engine/number.h"

namespace wrapopt {

// `bytes` bytes, `offset` bytes after a cache line. The address sanitizer sees
// an access one byte beyond the end. In a build without it, a canary lies
// there, as one does before the begin in each build.
class Array {
 public:
  explicit Array(size_t bytes, size_t offset = 0)
      : bytes_(bytes), before_(kCanary + offset) {
    void* memory;
    if (posix_memalign(&memory, 64, before_ + bytes_ + kAfter) != 0) {
      throw std::bad_alloc();
    }
    memory_ = static_cast<unsigned char*>(memory);
    std::memset(memory_, kFill, before_ + bytes_ + kAfter);
  }
  Array(const Array& from) : Array(from.bytes_, from.before_ - kCanary) {
    if (bytes_ > 0) std::memcpy(data(), from.data(), bytes_);
  }
  Array& operator=(const Array&) = delete;
  ~Array() {
    for (size_t i = 0; i < before_; ++i) {
      EXPECT_EQ(memory_[i], kFill) << before_ - i << " bytes before an array";
    }
    for (size_t i = 0; i < kAfter; ++i) {
      EXPECT_EQ(memory_[before_ + bytes_ + i], kFill)
          << i << " bytes after an array";
    }
    free(memory_);
  }

  size_t bytes() const { return bytes_; }
  void* data() const { return memory_ + before_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data());
  }

 private:
  static constexpr size_t kCanary = 64;
#if defined(__SANITIZE_ADDRESS__)
  static constexpr size_t kAfter = 0;
#else
  static constexpr size_t kAfter = kCanary;
#endif
  static constexpr unsigned char kFill = 0xa5;

  const size_t bytes_, before_;
  unsigned char* memory_;
};

constexpr Number kNumbers[] = {Number::kHalf, Number::kBfloat16,
                               Number::kFloat, Number::kDouble};

inline double Get(const Array& array, Number number, size_t i) {
  switch (number) {
    case Number::kHalf:
      return Load(array.as<Half>()[i]);
    case Number::kBfloat16:
      return Load(array.as<Bfloat16>()[i]);
    case Number::kFloat:
      return array.as<float>()[i];
    case Number::kDouble:
      return array.as<double>()[i];
  }
  return 0;
}

inline void Set(const Array& array, Number number, size_t i, double x) {
  switch (number) {
    case Number::kHalf:
      return Store(array.as<Half>()[i], static_cast<float>(x));
    case Number::kBfloat16:
      return Store(array.as<Bfloat16>()[i], static_cast<float>(x));
    case Number::kFloat:
      return Store(array.as<float>()[i], static_cast<float>(x));
    case Number::kDouble:
      return Store(array.as<double>()[i], x);
  }
}

using Random = std::mt19937;

inline int64_t Below(int64_t n, Random* random) {
  return std::uniform_int_distribution<int64_t>(0, n - 1)(*random);
}

// The special numbers among those of an array, in this order: zeros; large and
// infinite ones; subnormal ones. Of a rule, these last have no certain result:
// arithmetic flushes them, but whether Max or Select does depends on the
// instructions that the compiler takes.
constexpr double kSpecial[] = {0,    -0.,     6e-8,     6e4,    -3e38,
                               1.7e308, INFINITY, -INFINITY, -3e-40, 4e-310};
constexpr int kZeros = 2, kInfinities = 8, kSubnormals = 10;

// An array of ordinary numbers of both signs. Some are among the first
// `specials` of kSpecial.
inline Array Numbers(size_t elements, Number number, Random* random,
                     size_t offset_elements = 0, int specials = kZeros) {
  const Array array(elements * SizeOf(number),
                    offset_elements * SizeOf(number));
  std::uniform_real_distribution<double> some(-2, 2);
  for (size_t i = 0; i < elements; ++i) {
    const bool special = Below(16, random) == 0;
    Set(array, number, i,
        special ? kSpecial[Below(specials, random)] : some(*random));
  }
  return array;
}

// Expects equal bits; a NaN equals any other.
inline void ExpectSame(const Array& got, const Array& want, Number number,
                       const std::string& where) {
  ASSERT_EQ(got.bytes(), want.bytes());
  if (got.bytes() == 0 ||
      std::memcmp(got.data(), want.data(), got.bytes()) == 0) {
    return;
  }
  const size_t size = SizeOf(number);
  for (size_t i = 0; i < got.bytes() / size; ++i) {
    const double x = Get(got, number, i), y = Get(want, number, i);
    if (std::isnan(x) && std::isnan(y)) continue;
    ASSERT_EQ(std::memcmp(got.as<char>() + i * size, want.as<char>() + i * size,
                          size),
              0)
        << where << ": element " << i << " of " << got.bytes() / size
        << " is " << x << ", not " << y;
  }
}

}  // namespace wrapopt

#endif  // WRAPOPT_TESTS_CC_ARRAYS_H_
