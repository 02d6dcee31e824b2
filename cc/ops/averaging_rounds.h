#ifndef WRAPOPT_CC_OPS_AVERAGING_ROUNDS_H_
#define WRAPOPT_CC_OPS_AVERAGING_ROUNDS_H_

#include "absl/status/status.h"
#include "cc/ops/contracts.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace wrapopt {

// Check the inputs "timeout_secs", "workers" and "turns" of the averaging ops.
absl::Status CheckTimeout(double timeout_secs);
absl::Status CheckWorkers(const tensorflow::PartialTensorShape& shape);
absl::Status CheckTurns(const tensorflow::PartialTensorShape& shape);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_OPS_AVERAGING_ROUNDS_H_
