#ifndef WRAPOPT_CC_XLA_COMPENSATION_H_
#define WRAPOPT_CC_XLA_COMPENSATION_H_

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "cc/rules/rules.h"
#include "cc/xla/elementwise.h"
#include "xla/hlo/builder/xla_builder.h"
#include "xla/xla_data.pb.h"

namespace wrapopt {

// Compensates gradients for their age: see cc/rules/compensation.h.
class XlaCompensation {
 public:
  // `type` is the compute type, which the policy's scalars have.
  XlaCompensation(const PolicyInfo& policy, xla::PrimitiveType type,
                  std::vector<xla::XlaOp> scalars)
      : policy_(policy), type_(type), scalars_(std::move(scalars)) {}

  // The gradient that the step takes. `memory` are the policy's states of the
  // variable, or rows of them.
  xla::XlaOp Before(xla::XlaOp var, xla::XlaOp origin, xla::XlaOp grad,
                    std::vector<xla::XlaOp>* memory) const {
    std::vector<xla::XlaOp> states = *memory;
    states.push_back(xla::ConvertElementType(var, type_) -
                     xla::ConvertElementType(origin, type_));
    Step(policy_.rule, type_, absl::MakeSpan(states), {grad},
         absl::MakeConstSpan(scalars_).first(policy_.scalars_before()));
    std::copy_n(states.begin(), memory->size(), memory->begin());
    return states.back();
  }

  // Measures the step from `before` to `after`.
  void After(xla::XlaOp before, xla::XlaOp after,
             std::vector<xla::XlaOp>* memory) const {
    if (!policy_.measures) return;
    xla::XlaOp states[] = {(*memory)[0],
                           xla::ConvertElementType(before, type_)};
    Step(RuleId::kStepSize, type_, absl::MakeSpan(states), {after},
         {scalars_.back()});
    (*memory)[0] = states[0];
  }

 private:
  const PolicyInfo& policy_;
  const xla::PrimitiveType type_;
  const std::vector<xla::XlaOp> scalars_;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_XLA_COMPENSATION_H_
