#ifndef WRAPOPT_CC_OPS_STALENESS_GATE_H_
#define WRAPOPT_CC_OPS_STALENESS_GATE_H_

#include "absl/status/status.h"
#include "cc/ops/contracts.h"

namespace wrapopt {

// Check the variables of the staleness ops.
absl::Status CheckStep(const CheckedVariables& variables, int step);
absl::Status CheckGate(const CheckedVariables& variables, int step, int counter,
                       int histogram);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_OPS_STALENESS_GATE_H_
