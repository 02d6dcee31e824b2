#ifndef WRAPOPT_CC_OPS_PACKED_H_
#define WRAPOPT_CC_OPS_PACKED_H_

#include <cstdint>

#include "absl/status/status.h"
#include "cc/ops/contracts.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace wrapopt {

// Checks the shape of the input "packed" of `count` variables, which have this
// number of elements, -1 if it is not known.
absl::Status CheckPacked(const tensorflow::PartialTensorShape& shape, int count,
                         int64_t elements);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_OPS_PACKED_H_
