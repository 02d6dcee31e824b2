#ifndef WRAPOPT_CC_OPS_AVERAGING_ROUNDS_H_
#define WRAPOPT_CC_OPS_AVERAGING_ROUNDS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/ops/contracts.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {

// Check inputs and attributes of the averaging ops.
absl::Status CheckTimeout(double timeout_secs);
absl::Status CheckPlace(const tensorflow::PartialTensorShape& shape);
absl::Status CheckKnown(const tensorflow::PartialTensorShape& shape);
absl::Status CheckVectors(const tensorflow::DataTypeVector& dtypes,
                          const std::vector<int64_t>& sizes);
absl::Status CheckTravels(const std::string& travels,
                          const tensorflow::DataTypeVector& dtypes,
                          bool holds_center);
// `sizes` divides `count` variables: into those of each vector, and counters. A
// size of 0 is one counter; the rest are counters, too.
absl::Status CheckGroups(const std::vector<int64_t>& sizes, int64_t count);

struct RoundsOutput {
  std::string spec;
  std::vector<int64_t> shape = {};  // -1: unknown.
};

// Registers a stateful op, which checks its inputs in their order: all but
// "place", "known" and "values" must be scalars.
bool RegisterRoundsOp(const char* name, const std::vector<std::string>& inputs,
                      const std::vector<RoundsOutput>& outputs, const char* doc,
                      const std::vector<std::string>& attrs = {});

}  // namespace wrapopt

#endif  // WRAPOPT_CC_OPS_AVERAGING_ROUNDS_H_
