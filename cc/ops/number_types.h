// The number types in an op's attributes.
#ifndef WRAPOPT_CC_OPS_NUMBER_TYPES_H_
#define WRAPOPT_CC_OPS_NUMBER_TYPES_H_

#include "cc/engine/number.h"

// "half, bfloat16, float, double, ".
#define WRAPOPT_NUMBER_TYPE(number, storage, dtype, name, ffi) name ", "
#define WRAPOPT_NUMBER_NAMES WRAPOPT_NUMBERS(WRAPOPT_NUMBER_TYPE)
// For Attr("T: " WRAPOPT_NUMBER_TYPES).
#define WRAPOPT_NUMBER_TYPES "{" WRAPOPT_NUMBER_NAMES "}"

#endif  // WRAPOPT_CC_OPS_NUMBER_TYPES_H_
