// How a thread of a GPU kernel reads and writes its numbers of an array. Uses
// the macro WRAPOPT_DEVICE of cc/gpu/elementwise.cu, which includes this.
#ifndef WRAPOPT_CC_GPU_ACCESS_H_
#define WRAPOPT_CC_GPU_ACCESS_H_

#include <cstddef>
#include <cstdint>

#include "cc/engine/number.h"
#include "cc/gpu/table.h"

namespace wrapopt {
namespace gpu {
namespace {

struct alignas(16) Quad {
  uint32_t words[4];
};

// Whether a number is stored in 2 bytes, not in its compute type.
template <class Compute>
WRAPOPT_DEVICE bool IsNarrow(Number number) {
  return sizeof(Compute) == 4 && number != Number::kFloat;
}

template <class Compute>
WRAPOPT_DEVICE uint32_t BytesOf(Number number) {
  return IsNarrow<Compute>(number) ? 2 : sizeof(Compute);
}

// The ways in which a thread reads and writes its numbers of an array. Both
// have
//
//   kCount   the number of these numbers;
//   Raw      the numbers as stored: Load does not wait for them, Unpack does.

// kLanes numbers in accesses of 16 bytes, in two runs whose starts are `gap`
// elements apart. For half and bfloat16 the runs are adjacent, and one access
// serves both. All arrays must be aligned to 16 bytes.
template <class Compute>
struct Lanes {
  static constexpr int kCount = kLanes<Compute>;

  struct Raw {
    Quad quads[2];
  };

  uint64_t begin;
  uint32_t gap;

  WRAPOPT_DEVICE void Load(const char* array, Number number, Raw* raw) const {
    const char* const p = array + begin * BytesOf<Compute>(number);
    raw->quads[0] = *reinterpret_cast<const Quad*>(p);
    if (!IsNarrow<Compute>(number)) {
      raw->quads[1] = *reinterpret_cast<const Quad*>(p + gap * sizeof(Compute));
    }
  }

  WRAPOPT_DEVICE void Store(char* array, Number number, const Raw& raw) const {
    char* const p = array + begin * BytesOf<Compute>(number);
    *reinterpret_cast<Quad*>(p) = raw.quads[0];
    if (!IsNarrow<Compute>(number)) {
      *reinterpret_cast<Quad*>(p + gap * sizeof(Compute)) = raw.quads[1];
    }
  }

  WRAPOPT_DEVICE static void Unpack(const Raw& raw, Number number,
                                    Compute (&x)[kCount]) {
    if constexpr (sizeof(Compute) == 8) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        x[j] = BitCast<double>(uint64_t{Word(raw, 2 * j + 1)} << 32 |
                               Word(raw, 2 * j));
      }
    } else if (number == Number::kFloat) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) x[j] = BitCast<float>(Word(raw, j));
    } else if (number == Number::kHalf) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        x[j] = wrapopt::Load(Half{HalfWord(raw, j)});
      }
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        x[j] = wrapopt::Load(Bfloat16{HalfWord(raw, j)});
      }
    }
  }

  WRAPOPT_DEVICE static void Pack(const Compute (&x)[kCount], Number number,
                                  Raw* raw) {
    if constexpr (sizeof(Compute) == 8) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const uint64_t bits = BitCast<uint64_t>(x[j]);
        Word(*raw, 2 * j) = static_cast<uint32_t>(bits);
        Word(*raw, 2 * j + 1) = static_cast<uint32_t>(bits >> 32);
      }
    } else if (number == Number::kFloat) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        Word(*raw, j) = BitCast<uint32_t>(x[j]);
      }
    } else if (number == Number::kHalf) {
      PackHalves<Half>(x, raw);
    } else {
      PackHalves<Bfloat16>(x, raw);
    }
  }

 private:
  template <class AnyRaw>
  WRAPOPT_DEVICE static auto& Word(AnyRaw& raw, int i) {
    return raw.quads[i / 4].words[i % 4];
  }

  WRAPOPT_DEVICE static uint16_t HalfWord(const Raw& raw, int j) {
    return static_cast<uint16_t>(Word(raw, j / 2) >> (j % 2 * 16));
  }

  template <class Storage>
  WRAPOPT_DEVICE static void PackHalves(const float (&x)[kCount], Raw* raw) {
#pragma unroll
    for (int j = 0; j < kCount; j += 2) {
      Storage low, high;
      wrapopt::Store(low, x[j]);
      wrapopt::Store(high, x[j + 1]);
      Word(*raw, j / 2) = uint32_t{high.bits} << 16 | low.bits;
    }
  }
};

// One number: for arrays that are not aligned, such as a slice of a tensor, and
// for the last elements.
template <class Compute>
struct Single {
  static constexpr int kCount = 1;

  using Raw = uint64_t;

  uint64_t begin;

  WRAPOPT_DEVICE void Load(const char* array, Number number, Raw* raw) const {
    if constexpr (sizeof(Compute) == 8) {
      *raw = reinterpret_cast<const uint64_t*>(array)[begin];
    } else if (!IsNarrow<Compute>(number)) {
      *raw = reinterpret_cast<const uint32_t*>(array)[begin];
    } else {
      *raw = reinterpret_cast<const uint16_t*>(array)[begin];
    }
  }

  WRAPOPT_DEVICE void Store(char* array, Number number, const Raw& raw) const {
    if constexpr (sizeof(Compute) == 8) {
      reinterpret_cast<uint64_t*>(array)[begin] = raw;
    } else if (!IsNarrow<Compute>(number)) {
      reinterpret_cast<uint32_t*>(array)[begin] = static_cast<uint32_t>(raw);
    } else {
      reinterpret_cast<uint16_t*>(array)[begin] = static_cast<uint16_t>(raw);
    }
  }

  WRAPOPT_DEVICE static void Unpack(const Raw& raw, Number number,
                                    Compute (&x)[kCount]) {
    if constexpr (sizeof(Compute) == 8) {
      x[0] = BitCast<double>(raw);
    } else if (number == Number::kFloat) {
      x[0] = BitCast<float>(static_cast<uint32_t>(raw));
    } else if (number == Number::kHalf) {
      x[0] = wrapopt::Load(Half{static_cast<uint16_t>(raw)});
    } else {
      x[0] = wrapopt::Load(Bfloat16{static_cast<uint16_t>(raw)});
    }
  }

  WRAPOPT_DEVICE static void Pack(const Compute (&x)[kCount], Number number,
                                  Raw* raw) {
    if constexpr (sizeof(Compute) == 8) {
      *raw = BitCast<uint64_t>(x[0]);
    } else if (number == Number::kFloat) {
      *raw = BitCast<uint32_t>(x[0]);
    } else if (number == Number::kHalf) {
      *raw = Stored<Half>(x[0]);
    } else {
      *raw = Stored<Bfloat16>(x[0]);
    }
  }

 private:
  template <class Storage>
  WRAPOPT_DEVICE static uint16_t Stored(float x) {
    Storage to;
    wrapopt::Store(to, x);
    return to.bits;
  }
};

// Loads zeros where there is no array.
template <class Access>
WRAPOPT_DEVICE void LoadInput(const Access& access, const char* array,
                              Number number, typename Access::Raw* raw) {
  if (array == nullptr) {
    *raw = {};
  } else {
    access.Load(array, number, raw);
  }
}

// The arrays of one variable.
struct Arrays {
  const Word* bases;
  const uint32_t* offsets;

  template <class Compute>
  WRAPOPT_DEVICE char* Find(size_t i, Number number) const {
    return reinterpret_cast<char*>(bases[i]) +
           uint64_t{offsets[i]} * BytesOf<Compute>(number);
  }
  // nullptr for zeros.
  template <class Compute>
  WRAPOPT_DEVICE const char* FindInput(size_t i, Number number) const {
    return offsets[i] == kNoArray ? nullptr : Find<Compute>(i, number);
  }
  WRAPOPT_DEVICE Arrays From(size_t i) const {
    return {bases + i, offsets + i};
  }
};

WRAPOPT_DEVICE void Read(Word word, float* x) {
  *x = BitCast<float>(static_cast<uint32_t>(word));
}
WRAPOPT_DEVICE void Read(Word word, double* x) { *x = BitCast<double>(word); }

}  // namespace
}  // namespace gpu
}  // namespace wrapopt

#endif  // WRAPOPT_CC_GPU_ACCESS_H_
