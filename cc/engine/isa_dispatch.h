// One function, compiled for each instruction set.
//
// The attribute `target` compiles the versions from one source. The flag -mavx2
// on a file would also compile inline functions of the standard library for
// AVX2, and the linker might use those in the whole library.
#ifndef WRAPOPT_CC_ENGINE_ISA_DISPATCH_H_
#define WRAPOPT_CC_ENGINE_ISA_DISPATCH_H_

#include "cc/engine/isa.h"

namespace wrapopt {

// An F is a class with a function `Run`, which is always inlined, and with
//
//   Fn        the type of a pointer to Run;
//   kIsWide   whether x86-64-v4 computes in registers of 512 bits, or of 256.
//
// Code that waits for memory is not faster in wide registers: on Zen 4, it
// streams 15 % slower. Code that waits for arithmetic is faster.
//
// ForIsa is the version of F::Run for an instruction set.

template <class F, class... Args>
void Baseline(Args... args) {
  F::Run(args...);
}

#if defined(__aarch64__)
// The baseline has NEON. The length of SVE's registers is the processor's.
template <class F, class... Args>
__attribute__((target("+sve")))
void Sve(Args... args) {
  F::Run(args...);
}

template <class F>
typename F::Fn ForIsa(Isa isa) {
  if (isa == Isa::kSve) return &Sve<F>;
  return &Baseline<F>;
}
#else
template <class F, class... Args>
__attribute__((target("arch=x86-64-v3")))
void X86_64_v3(Args... args) {
  F::Run(args...);
}

template <class F, class... Args>
__attribute__((target("arch=x86-64-v4,prefer-vector-width=256")))
void X86_64_v4(Args... args) {
  F::Run(args...);
}

template <class F, class... Args>
__attribute__((target("arch=x86-64-v4,prefer-vector-width=512")))
void X86_64_v4Wide(Args... args) {
  F::Run(args...);
}

template <class F>
typename F::Fn ForIsa(Isa isa) {
  switch (isa) {
    case Isa::kBaseline:
      return &Baseline<F>;
    case Isa::kX86_64_v3:
      return &X86_64_v3<F>;
    case Isa::kX86_64_v4:
      if constexpr (F::kIsWide) {
        return &X86_64_v4Wide<F>;
      } else {
        return &X86_64_v4<F>;
      }
  }
  return nullptr;
}
#endif

}  // namespace wrapopt

#endif  // WRAPOPT_CC_ENGINE_ISA_DISPATCH_H_
