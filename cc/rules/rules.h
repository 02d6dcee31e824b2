// The list of update rules. Every back end registers from it.
//
// To add one: write cc/rules/<rule>.h, include it here, add its line, and give
// it an op (cc/ops) and a test. No back end changes.
//
// `Step` of a rule takes its states as V&, then its inputs and then its scalars
// as const V&. It is pure data flow: no `if` on a value, no loop, no literal
// that V may not have.
#ifndef WRAPOPT_CC_RULES_RULES_H_
#define WRAPOPT_CC_RULES_RULES_H_

#include "cc/rules/ema.h"

//  X(rule, states, inputs, scalars)
#define WRAPOPT_RULES(X) \
  X(Ema, 1, 1, 1)

namespace wrapopt {

enum class RuleId {
#define WRAPOPT_RULE_ID(rule, states, inputs, scalars) k##rule,
  WRAPOPT_RULES(WRAPOPT_RULE_ID)
#undef WRAPOPT_RULE_ID
};

struct RuleInfo {
  RuleId id;
  const char* name;
  int states;
  int inputs;
  int scalars;
};

inline constexpr RuleInfo kRules[] = {
#define WRAPOPT_RULE_INFO(rule, states, inputs, scalars) \
  {RuleId::k##rule, #rule, states, inputs, scalars},
    WRAPOPT_RULES(WRAPOPT_RULE_INFO)
#undef WRAPOPT_RULE_INFO
};

constexpr const RuleInfo& Info(RuleId rule) {
  return kRules[static_cast<int>(rule)];
}

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_RULES_H_
