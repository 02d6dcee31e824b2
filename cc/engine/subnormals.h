// Makes the CPU kernels flush subnormal numbers to zero.
#ifndef WRAPOPT_CC_ENGINE_SUBNORMALS_H_
#define WRAPOPT_CC_ENGINE_SUBNORMALS_H_

#include <cstdint>

#if !defined(__aarch64__)
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

  // Reading the register is cheap, writing it is not.
  FlushSubnormals() : before_(Get()) {
    if ((before_ & kFlush) != kFlush) Set(before_ | kFlush);
  }
  ~FlushSubnormals() {
    if ((before_ & kFlush) != kFlush) Set(before_);
  }

  // The thread's mode.
#if defined(__aarch64__)
  using Register = uint64_t;  // FPCR.
  // FZ, for operands and results.
  static constexpr Register kFlush = 1 << 24;
  static Register Get() {
    Register value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  // No arithmetic may move across it: "memory" keeps loads and stores in place,
  // and loops consist of them.
  static void Set(Register value) {
    asm volatile("msr fpcr, %0" : : "r"(value) : "memory");
  }
#else
  using Register = unsigned;  // MXCSR.
  // Flush to zero, for results; denormals are zeros, for operands.
  static constexpr Register kFlush = 0x8000 | 0x0040;
  static Register Get() { return _mm_getcsr(); }
  static void Set(Register value) { _mm_setcsr(value); }
#endif

 private:
  const Register before_;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_ENGINE_SUBNORMALS_H_
