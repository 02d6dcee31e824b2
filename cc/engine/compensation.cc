#include "cc/engine/compensation.h"

#include <algorithm>

namespace wrapopt {
namespace {

// The scratch arrays.
constexpr int kGrad = 0, kBefore = 1;

}  // namespace

Compensation::Compensation(const PolicyInfo& policy, Number states,
                           Number grads, Isa isa)
    : policy_(&policy),
      var_(states),
      grad_(grads),
      compute_(states == Number::kDouble ? Number::kDouble : Number::kFloat) {
  add_ = FindStep(RuleId::kWeightedSum, compute_, states, isa);
  rule_ = FindStep(policy.rule, compute_, grads, isa);
  of_sum_ = FindStep(policy.rule, compute_, compute_, isa);
  measure_ = FindStep(RuleId::kStepSize, compute_, states, isa);
}

void Compensation::AddStagesBefore(const double* scalars, Pass* pass) const {
  const int memory = states();
  // The rule's stage counts the variable's bytes.
  pass->AddStage({add_, kFirst, 2, 0, /*new_inputs=*/true, /*scratch=*/0,
                  kGrad});
  pass->AddStage({add_, kLess, 2, SizeOf(var_), /*new_inputs=*/true,
                  /*scratch=*/0, kGrad});
  pass->AddStage({rule_, scalars, memory + 2,
                  2 * memory * SizeOf(compute_) + SizeOf(grad_),
                  /*new_inputs=*/true, /*scratch=*/memory, kGrad});
  if (!policy_->measures) return;
  pass->AddStage({add_, kFirst, 2, 0, /*new_inputs=*/false, /*scratch=*/0,
                  kBefore});
}

void Compensation::AddStagesAfter(const double* scalars, Pass* pass) const {
  if (!policy_->measures) return;
  pass->AddStage({measure_, ScalarsAfter(scalars), 3, 0, /*new_inputs=*/false,
                  /*scratch=*/1, kBefore});
}

void Compensation::AddOperandsBefore(void* var, const void* origin,
                                     const void* grad,
                                     const std::vector<void*>& memory,
                                     std::vector<void*>* operands) const {
  operands->insert(operands->end(),
                   {nullptr, var, nullptr, const_cast<void*>(origin)});
  operands->insert(operands->end(), memory.begin(), memory.end());
  operands->insert(operands->end(), {nullptr, const_cast<void*>(grad)});
  if (policy_->measures) operands->insert(operands->end(), {nullptr, var});
}

void Compensation::AddOperandsAfter(void* var, const std::vector<void*>& memory,
                                    std::vector<void*>* operands) const {
  if (!policy_->measures) return;
  operands->insert(operands->end(), {memory[0], nullptr, var});
}

void Compensation::Before(const double* scalars, void* var, const void* origin,
                          const void* stale, bool is_sum, void* const* memory,
                          size_t count, void* grad, void* before) const {
  auto add = [&](void* to, const void* from, const double* weights) {
    void* operands[] = {to, const_cast<void*>(from)};
    add_.loop(operands, weights, 0, count, Ahead());
  };
  add(grad, var, kFirst);
  add(grad, origin, kLess);
  if (policy_->measures) add(before, var, kFirst);
  void* operands[kMostPolicyStates + 2];
  void** next = std::copy_n(memory, states(), operands);
  *next++ = grad;
  *next = const_cast<void*>(stale);
  (is_sum ? of_sum_ : rule_).loop(operands, scalars, 0, count, Ahead());
}

void Compensation::After(const double* scalars, void* var, void* const* memory,
                         size_t count, void* before) const {
  if (!policy_->measures) return;
  void* operands[] = {memory[0], before, var};
  measure_.loop(operands, ScalarsAfter(scalars), 0, count, Ahead());
}

}  // namespace wrapopt
