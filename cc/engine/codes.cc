#include "cc/engine/codes.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "cc/engine/isa_dispatch.h"
#include "cc/engine/subnormals.h"
#include "cc/rules/ema.h"
#include "cc/rules/maths.h"

namespace wrapopt {
namespace {

// A kind of code has two functions for a whole block, which is `bytes` long:
// Write, which also decodes the block to y, and Read.

struct Bfloat16s {
  static constexpr Code kCode = Code::kBfloat16;

  WRAPOPT_RULE static void Write(const float* x, float* y, char* block) {
    Bfloat16 numbers[kCodeBlock];
    for (size_t i = 0; i < kCodeBlock; ++i) {
      Store(numbers[i], x[i]);
      y[i] = Load(numbers[i]);
    }
    std::memcpy(block, numbers, sizeof(numbers));
  }

  WRAPOPT_RULE static void Read(const char* block, float* y) {
    Bfloat16 numbers[kCodeBlock];
    std::memcpy(numbers, block, sizeof(numbers));
    for (size_t i = 0; i < kCodeBlock; ++i) y[i] = Load(numbers[i]);
  }
};

// Integers in [-most, most], in a byte each or in half of one.
template <Code code, int most>
struct Integers {
  static constexpr Code kCode = code;
  static constexpr bool kIsHalf = code == Code::kInt4;
  // A sum with it is rounded to an integer, whose low bits come last.
  static constexpr float kRound = 0x1.8p23f;

  WRAPOPT_RULE static void Write(const float* x, float* y, char* block) {
    // As integers, magnitudes have the order of the numbers, and NaN is last.
    int32_t max = 0;
    for (size_t i = 0; i < kCodeBlock; ++i) {
      max = std::max(max, BitCast<int32_t>(x[i]) & 0x7fffffff);
    }
    const float scale = max >= 0x7f800000
                            ? std::numeric_limits<float>::quiet_NaN()
                            : BitCast<float>(max) / most;
    int8_t numbers[kCodeBlock];
    if (scale > 0) {
      for (size_t i = 0; i < kCodeBlock; ++i) {
        const float sum = x[i] / scale + kRound;
        numbers[i] = static_cast<int8_t>(BitCast<uint32_t>(sum));
        y[i] = (sum - kRound) * scale;
      }
    } else {
      std::memset(numbers, 0, sizeof(numbers));
      std::fill_n(y, kCodeBlock, scale);
    }
    std::memcpy(block, &scale, sizeof(scale));
    block += sizeof(scale);
    if constexpr (kIsHalf) {
      // A word is two numbers, the first one in its low byte.
      uint16_t words[kCodeBlock / 2];
      uint8_t bytes[kCodeBlock / 2];
      std::memcpy(words, numbers, sizeof(numbers));
      for (size_t i = 0; i < kCodeBlock / 2; ++i) {
        bytes[i] = (words[i] & 0x0f) | ((words[i] >> 4) & 0xf0);
      }
      std::memcpy(block, bytes, sizeof(bytes));
    } else {
      std::memcpy(block, numbers, sizeof(numbers));
    }
  }

  WRAPOPT_RULE static void Read(const char* block, float* y) {
    float scale;
    std::memcpy(&scale, block, sizeof(scale));
    block += sizeof(scale);
    int8_t numbers[kCodeBlock];
    if constexpr (kIsHalf) {
      uint8_t bytes[kCodeBlock / 2];
      uint16_t words[kCodeBlock / 2];
      std::memcpy(bytes, block, sizeof(bytes));
      for (size_t i = 0; i < kCodeBlock / 2; ++i) {
        words[i] = (bytes[i] & 0x0f) | ((bytes[i] & 0xf0) << 4);
      }
      std::memcpy(numbers, words, sizeof(numbers));
      for (size_t i = 0; i < kCodeBlock; ++i) {
        numbers[i] = static_cast<int8_t>((numbers[i] ^ 8) - 8);
      }
    } else {
      std::memcpy(numbers, block, sizeof(numbers));
    }
    for (size_t i = 0; i < kCodeBlock; ++i) {
      y[i] = static_cast<float>(numbers[i]) * scale;
    }
  }
};

// Calls work(first number, how many, their block, whether it is whole), with
// constants for whole blocks.
template <Code code, class Work>
WRAPOPT_RULE void ForBlocks(size_t numbers, const Work& work) {
  const size_t whole = numbers / kCodeBlock;
  for (size_t b = 0; b < whole; ++b) {
    work(b * kCodeBlock, kCodeBlock, b * CodeBytes(code, kCodeBlock));
  }
  if (whole * kCodeBlock < numbers) {
    work(whole * kCodeBlock, numbers - whole * kCodeBlock,
         whole * CodeBytes(code, kCodeBlock));
  }
}

template <class Kind, class Value>
struct Encode {
  using Fn = EncodeFn;
  static constexpr bool kIsWide = false;

  WRAPOPT_RULE static void Run(const void* values, const float* center,
                               const float* error, size_t numbers, void* code,
                               float* new_error) {
    const FlushSubnormals flush;
    ForBlocks<Kind::kCode>(numbers, [=](size_t first, size_t count, size_t at)
                                        __attribute__((always_inline)) {
      const Value* const value = static_cast<const Value*>(values) + first;
      float x[kCodeBlock], y[kCodeBlock];
      if (count < kCodeBlock) std::memset(x, 0, sizeof(x));
      if (center == nullptr) {
        for (size_t i = 0; i < count; ++i) {
          x[i] = Load(value[i]) + error[first + i];
        }
      } else {
        for (size_t i = 0; i < count; ++i) {
          x[i] = Load(value[i]) - center[first + i] + error[first + i];
        }
      }
      char* const block = static_cast<char*>(code) + at;
      if (count == kCodeBlock) {
        Kind::Write(x, y, block);
      } else {
        char whole[CodeBytes(Kind::kCode, kCodeBlock)];
        Kind::Write(x, y, whole);
        std::memcpy(block, whole, CodeBytes(Kind::kCode, count));
      }
      for (size_t i = 0; i < count; ++i) new_error[first + i] = x[i] - y[i];
    });
  }
};

template <class Kind>
struct Decode {
  using Fn = DecodeFn;
  static constexpr bool kIsWide = false;

  WRAPOPT_RULE static void Run(const float* from, const void* code,
                               const double* rate, size_t numbers, float* to) {
    const FlushSubnormals flush;
    const float by = rate == nullptr ? 0 : static_cast<float>(*rate);
    ForBlocks<Kind::kCode>(numbers, [=](size_t first, size_t count, size_t at)
                                        __attribute__((always_inline)) {
      const char* const block = static_cast<const char*>(code) + at;
      float y[kCodeBlock];
      if (count == kCodeBlock) {
        Kind::Read(block, y);
      } else {
        char whole[CodeBytes(Kind::kCode, kCodeBlock)] = {};
        std::memcpy(whole, block, CodeBytes(Kind::kCode, count));
        Kind::Read(whole, y);
      }
      if (rate == nullptr) {
        for (size_t i = 0; i < count; ++i) {
          to[first + i] = from[first + i] + y[i];
        }
      } else {
        for (size_t i = 0; i < count; ++i) {
          float x = from[first + i];
          Ema::Step(x, y[i], by);
          to[first + i] = x;
        }
      }
    });
  }
};

// Calls `find` with the kind of a code.
template <class Find>
auto ForCode(Code code, const Find& find) {
  switch (code) {
    case Code::kBfloat16:
      return find(Bfloat16s());
    case Code::kInt8:
      return find(Integers<Code::kInt8, 127>());
    case Code::kInt4:
      break;
  }
  return find(Integers<Code::kInt4, 7>());
}

}  // namespace

EncodeFn FindEncode(Code code, Number values, Isa isa) {
  return ForCode(code, [=](auto kind) -> EncodeFn {
    using Kind = decltype(kind);
    switch (values) {
      case Number::kHalf:
        return ForIsa<Encode<Kind, Half>>(isa);
      case Number::kBfloat16:
        return ForIsa<Encode<Kind, Bfloat16>>(isa);
      case Number::kFloat:
        return ForIsa<Encode<Kind, float>>(isa);
      case Number::kDouble:
        break;
    }
    return nullptr;
  });
}

DecodeFn FindDecode(Code code, Isa isa) {
  return ForCode(code, [=](auto kind) {
    return ForIsa<Decode<decltype(kind)>>(isa);
  });
}

}  // namespace wrapopt
