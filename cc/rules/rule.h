// What every rule header starts from. No TensorFlow, no CUDA, no XLA include:
// each back end brings its own number type V.
#ifndef WRAPOPT_CC_RULES_RULE_H_
#define WRAPOPT_CC_RULES_RULE_H_

#if defined(__CUDACC__)
#define WRAPOPT_RULE __host__ __device__ __forceinline__
#else
#define WRAPOPT_RULE inline __attribute__((always_inline))
#endif

#endif  // WRAPOPT_CC_RULES_RULE_H_
