// Included by every rule header. Includes nothing of TensorFlow, CUDA or XLA:
// each back end has its number type V.
#ifndef WRAPOPT_CC_RULES_RULE_H_
#define WRAPOPT_CC_RULES_RULE_H_

#if defined(__CUDACC__)
#define WRAPOPT_RULE __host__ __device__ __forceinline__
#else
#define WRAPOPT_RULE inline __attribute__((always_inline))
#endif

#endif  // WRAPOPT_CC_RULES_RULE_H_
