// The stages of a step that compensates for the age of its gradients: see
// cc/rules/compensation.h. Does not depend on TensorFlow.
//
// Before the step, a scratch array gets the delay, and then the gradient that
// the step takes. After it, the policy may measure the step. All of it happens
// to a block while it is in the cache, so a step passes over memory once.
#ifndef WRAPOPT_CC_ENGINE_COMPENSATION_H_
#define WRAPOPT_CC_ENGINE_COMPENSATION_H_

#include <cstddef>
#include <vector>

#include "cc/engine/elementwise.h"
#include "cc/engine/isa.h"
#include "cc/engine/number.h"
#include "cc/rules/rules.h"

namespace wrapopt {

class Compensation {
 public:
  Compensation() = default;
  // `states` and `grads` are the types of the variables and of the gradients.
  // The states of the policy and the compensated gradient are of the type of
  // `compute()`.
  Compensation(const PolicyInfo& policy, Number states, Number grads, Isa isa);

  Number compute() const { return compute_; }

  // Adds the stages before and after the step of a rule, whose input is scratch
  // array 0 of the pass. `scalars` are the policy's.
  void AddStagesBefore(const double* scalars, Pass* pass) const;
  void AddStagesAfter(const double* scalars, Pass* pass) const;

  // Adds the operands of these stages. `memory` are the policy's states.
  void AddOperandsBefore(void* var, const void* origin, const void* grad,
                         const std::vector<void*>& memory,
                         std::vector<void*>* operands) const;
  void AddOperandsAfter(void* var, const std::vector<void*>& memory,
                        std::vector<void*>* operands) const;

  // The same for `count` elements of arrays. `grad` becomes the compensated
  // gradient, `before` keeps the weights for the function After. If `is_sum`,
  // `stale` is of the type of `compute()`.
  void Before(const double* scalars, void* var, const void* origin,
              const void* stale, bool is_sum, void* const* memory,
              size_t count, void* grad, void* before) const;
  void After(const double* scalars, void* var, void* const* memory,
             size_t count, void* before) const;

  size_t states() const { return policy_->states(); }

 private:
  static constexpr double kFirst[] = {1, 1}, kLess[] = {-1, 0};

  // Of the policy's scalars, those of the stage after the step.
  const double* ScalarsAfter(const double* scalars) const {
    return scalars + policy_->scalars_before();
  }

  const PolicyInfo* policy_ = nullptr;
  Number var_ = Number::kFloat, grad_ = Number::kFloat,
         compute_ = Number::kFloat;
  RuleStep add_;      // Adds a variable, times a weight, to a scratch array.
  RuleStep rule_;     // The policy's, for a gradient.
  RuleStep of_sum_;   // The same for a sum of gradients.
  RuleStep measure_;  // StepSize.
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_ENGINE_COMPENSATION_H_
