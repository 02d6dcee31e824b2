#ifndef WRAPOPT_CC_OPS_EXCHANGE_H_
#define WRAPOPT_CC_OPS_EXCHANGE_H_

#include "absl/status/status.h"
#include "cc/ops/contracts.h"

namespace wrapopt {

// Checks that `a` and `b` can exchange values.
absl::Status CheckExchange(const CheckedVariables& variables, int a, int b);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_OPS_EXCHANGE_H_
