// Makes the CPU kernels flush subnormal numbers to zero.
#ifndef WRAPOPT_CC_ENGINE_SUBNORMALS_H_
#define WRAPOPT_CC_ENGINE_SUBNORMALS_H_

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace wrapopt {

// While an object is alive, its thread's arithmetic replaces subnormal operands
// and results by zeros of the same sign. TensorFlow's own threads do so anyway;
// other threads, such as Python's in eager mode, may not. Many processors take
// a hundred times as long for subnormal numbers, and an average that decays
// towards zero ends up with many of them.
class FlushSubnormals {
 public:
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

#if defined(__SSE2__)
  // Reading the register is cheap, writing it is not.
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
  // On other processors, the thread's mode applies.
  FlushSubnormals() {}
#endif
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_ENGINE_SUBNORMALS_H_
