// Codes of tensors.
#ifndef WRAPOPT_CC_KERNELS_CODES_H_
#define WRAPOPT_CC_KERNELS_CODES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>

#include "cc/engine/codes.h"
#include "cc/engine/isa.h"
#include "cc/engine/number.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/threads.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace wrapopt {

// The code that an attribute allows.
inline Code CodeOf(const std::string& name) {
  return static_cast<Code>(
      std::find(std::begin(kCodeNames), std::end(kCodeNames) - 1, name) -
      std::begin(kCodeNames));
}

// Calls work(first number, how many, their code) for whole blocks, in threads.
template <class Work>
void ForBlocks(tensorflow::OpKernelContext* ctx, Code code, int64_t numbers,
               void* bytes, const Work& work) {
  constexpr int64_t kBlock = kCodeBlock, kCycles = 2 * kBlock;
  RunParallel(ctx, (numbers + kBlock - 1) / kBlock, kCycles,
              [&](int64_t begin, int64_t end) {
                work(begin * kBlock,
                     std::min(end * kBlock, numbers) - begin * kBlock,
                     static_cast<char*>(bytes) +
                         begin * CodeBytes(code, kBlock));
              });
}

// As EncodeFn without a center. `error` gets the new one.
inline void Encode(tensorflow::OpKernelContext* ctx, Code code, Isa isa,
                   const tensorflow::Tensor& values, float* error,
                   tensorflow::Tensor* coded) {
  const Number number = NumberOf(values.dtype());
  const EncodeFn encode = FindEncode(code, number, isa);
  const char* const data = static_cast<const char*>(values.data());
  ForBlocks(ctx, code, values.NumElements(), coded->data(),
            [&](int64_t first, int64_t count, char* bytes) {
              encode(data + first * SizeOf(number), /*center=*/nullptr,
                     error + first, count, bytes, error + first);
            });
}

// As DecodeFn.
inline void Decode(tensorflow::OpKernelContext* ctx, Code code, Isa isa,
                   const tensorflow::Tensor& from,
                   const tensorflow::Tensor& coded, const double* rate,
                   tensorflow::Tensor* to) {
  const DecodeFn decode = FindDecode(code, isa);
  const float* const old = static_cast<const float*>(from.data());
  float* const data = static_cast<float*>(to->data());
  ForBlocks(ctx, code, to->NumElements(), coded.data(),
            [&](int64_t first, int64_t count, char* bytes) {
              decode(old + first, bytes, rate, count, data + first);
            });
}

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_CODES_H_
