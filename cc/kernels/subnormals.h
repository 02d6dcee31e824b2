// How the CPU's kernels compute with subnormal numbers: not at all.
#ifndef WRAPOPT_CC_KERNELS_SUBNORMALS_H_
#define WRAPOPT_CC_KERNELS_SUBNORMALS_H_

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace wrapopt {

// While one is alive, its thread's arithmetic takes subnormal operands and
// results for zero, with their sign. TensorFlow's own threads do so; others,
// such as that of Python in eager mode, need not. Many processors take a
// hundred times as long for a subnormal number, which an average that decays
// towards zero would be full of in the end.
class FlushSubnormals {
 public:
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

#if defined(__SSE2__)
  // To read the register is cheap, to write it is not.
  FlushSubnormals() : before_(_mm_getcsr()) {
    if ((before_ & kFlush) != kFlush) _mm_setcsr(before_ | kFlush);
  }
  ~FlushSubnormals() {
    if ((before_ & kFlush) != kFlush) _mm_setcsr(before_);
  }

 private:
  // Flush to zero, for results; denormals are zeros, for operands.
  static constexpr unsigned kFlush = 0x8000 | 0x0040;
  const unsigned before_;
#else
  // Elsewhere, what the thread does decides.
  FlushSubnormals() {}
#endif
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_SUBNORMALS_H_
