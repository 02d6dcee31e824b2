// The functions that rules may use besides + - * /, for float and double. A
// back end with another number type defines functions of the same names for it,
// such as those for XLA in cc/kernels/elementwise_xla.cc.
#ifndef WRAPOPT_CC_RULES_MATHS_H_
#define WRAPOPT_CC_RULES_MATHS_H_

#include <cmath>

#include "cc/rules/rule.h"

namespace wrapopt {

// A literal, of the number type of `like`.
WRAPOPT_RULE float ScalarLike(float like, double x) {
  static_cast<void>(like);
  return static_cast<float>(x);
}
WRAPOPT_RULE double ScalarLike(double like, double x) {
  static_cast<void>(like);
  return x;
}

WRAPOPT_RULE float Sqrt(float x) { return std::sqrt(x); }
WRAPOPT_RULE double Sqrt(double x) { return std::sqrt(x); }

template <class V>
WRAPOPT_RULE V Square(const V& x) {
  return x * x;
}

WRAPOPT_RULE bool Eq(float a, float b) { return a == b; }
WRAPOPT_RULE bool Eq(double a, double b) { return a == b; }

WRAPOPT_RULE bool Gt(float a, float b) { return a > b; }
WRAPOPT_RULE bool Gt(double a, double b) { return a > b; }

WRAPOPT_RULE float Select(bool which, float yes, float no) {
  return which ? yes : no;
}
WRAPOPT_RULE double Select(bool which, double yes, double no) {
  return which ? yes : no;
}

WRAPOPT_RULE float Max(float a, float b) { return a > b ? a : b; }
WRAPOPT_RULE double Max(double a, double b) { return a > b ? a : b; }

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_MATHS_H_
