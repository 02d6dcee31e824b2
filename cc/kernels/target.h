// A function compiled for an instruction set of its own.
//
// The versions are compiled from one text by `target`, not by -mavx2 on a file:
// that flag would also compile the inline functions of the standard library for
// AVX2, and the linker may keep those for everybody.
#ifndef WRAPOPT_CC_KERNELS_TARGET_H_
#define WRAPOPT_CC_KERNELS_TARGET_H_

#if defined(__x86_64__)
#define WRAPOPT_TARGET(isa) __attribute__((target(isa)))
#else
#define WRAPOPT_TARGET(isa)
#endif

#endif  // WRAPOPT_CC_KERNELS_TARGET_H_
