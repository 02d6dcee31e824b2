// Codes: vectors of numbers, each in a few bits, for slow networks. Does not
// depend on TensorFlow.
//
// A code is an array of bytes. For "bfloat16", it is the numbers, rounded to
// nearest, ties to even. For "int8" and "int4", it is a sequence of blocks of
// kCodeBlock numbers, of which the last one may have fewer:
//
//   scale      max |x| / most, a float in the machine's order of bytes
//   numbers    round(x / scale) to nearest, ties to even: integers in
//              [-most, most], where most is 127 or 7
//
// Two int4 are in a byte, the first one in its low bits. The numbers of a block
// of zeros are 0, and so is its scale. If a number of a block is not finite,
// its scale is NaN. A number x is decoded as integer * scale.
//
// The loops flush subnormal numbers, see subnormals.h, also those of scales.
// All instruction sets give the same bits. The code of some whole blocks and
// the code of the numbers after them are, one after the other, the code of all.
#ifndef WRAPOPT_CC_ENGINE_CODES_H_
#define WRAPOPT_CC_ENGINE_CODES_H_

#include <cstddef>

#include "cc/engine/isa.h"
#include "cc/engine/number.h"

namespace wrapopt {

enum class Code { kBfloat16, kInt8, kInt4 };

inline constexpr const char* kCodeNames[] = {"bfloat16", "int8", "int4"};

inline constexpr size_t kCodeBlock = 128;

// The bytes of the code of so many numbers.
constexpr size_t CodeBytes(Code code, size_t numbers) {
  const size_t blocks = (numbers + kCodeBlock - 1) / kCodeBlock;
  switch (code) {
    case Code::kBfloat16:
      return 2 * numbers;
    case Code::kInt8:
      return blocks * sizeof(float) + numbers;
    case Code::kInt4:
      return blocks * sizeof(float) + (numbers + 1) / 2;
  }
  return 0;
}

// Codes x = values - center + error, and leaves in `new_error` what is lost: x
// minus the decoded number. `center` may be nullptr, for zeros. `new_error` may
// be `error`.
using EncodeFn = void (*)(const void* values, const float* center,
                          const float* error, size_t numbers, void* code,
                          float* new_error);

// nullptr for values of double.
EncodeFn FindEncode(Code code, Number values, Isa isa);

// to = from + the decoded numbers. With a rate, `from` moves towards them by
// the rule Ema instead. `to` may be `from`.
using DecodeFn = void (*)(const float* from, const void* code,
                          const double* rate, size_t numbers, float* to);

DecodeFn FindDecode(Code code, Isa isa);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_ENGINE_CODES_H_
