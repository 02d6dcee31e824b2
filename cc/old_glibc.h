// Chooses an older version of a function of glibc than the one of the system
// that builds, because TensorFlow's own wheel needs no more than glibc 2.27:
//
//   WRAPOPT_OLD_GLIBC(dlopen, "2.2.5");
//
// The version is that of x86-64. On aarch64, all of them are of glibc 2.17, its
// first. See also old_glibc.cc.
#ifndef WRAPOPT_CC_OLD_GLIBC_H_
#define WRAPOPT_CC_OLD_GLIBC_H_

#include <features.h>

#if defined(__x86_64__) && defined(__GLIBC__)
#define WRAPOPT_OLD_GLIBC(function, version) \
  __asm__(".symver " #function "," #function "@GLIBC_" version)
#elif defined(__aarch64__) && defined(__GLIBC__)
#define WRAPOPT_OLD_GLIBC(function, version) \
  __asm__(".symver " #function "," #function "@GLIBC_2.17")
#else
#define WRAPOPT_OLD_GLIBC(function, version) static_assert(true)
#endif

#endif  // WRAPOPT_CC_OLD_GLIBC_H_
