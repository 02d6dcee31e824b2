// Compiles a function for a certain instruction set.
//
// The attribute `target` compiles the versions from one source. The flag -mavx2
// on a file would also compile inline functions of the standard library for
// AVX2, and the linker might use those in the whole library.
#ifndef WRAPOPT_CC_KERNELS_TARGET_H_
#define WRAPOPT_CC_KERNELS_TARGET_H_

#if defined(__x86_64__)
#define WRAPOPT_TARGET(isa) __attribute__((target(isa)))
#else
#define WRAPOPT_TARGET(isa)
#endif

#endif  // WRAPOPT_CC_KERNELS_TARGET_H_
