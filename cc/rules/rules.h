// The list of update rules. Every back end registers from it.
//
// To add one: write cc/rules/<rule>.h, include it here, add its line, and give
// it an op (cc/ops) and a test. No back end changes.
//
// `Step` of a rule takes its states as V&, then its inputs and then its scalars
// as const V&. It is pure data flow: Select instead of `if`, no loop, and the
// functions and literals of cc/rules/maths.h.
//
// A line names them, in the order of `Step`. Of the scalars,
//
//   lr                    is a scalar input of the op;
//   use_nesterov?         is an attribute of the op, true or false: 1 or 0;
//
// What a sparse gradient does, as TensorFlow's optimizers have it: kRows, the
// step is taken for the rows that it holds and for no other; kAll, its other
// rows count as zero.
#ifndef WRAPOPT_CC_RULES_RULES_H_
#define WRAPOPT_CC_RULES_RULES_H_

#include <cstddef>
#include <string_view>

#include "cc/rules/adadelta.h"
#include "cc/rules/adagrad.h"
#include "cc/rules/adam.h"
#include "cc/rules/adam_with_amsgrad.h"
#include "cc/rules/centered_rms_prop.h"
#include "cc/rules/ema.h"
#include "cc/rules/ftrl.h"
#include "cc/rules/gradient_descent.h"
#include "cc/rules/momentum.h"
#include "cc/rules/rms_prop.h"
#include "cc/rules/weighted_sum.h"

//  X(rule, states, inputs, scalars, sparse)
#define WRAPOPT_RULES(X)                                                     \
  X(Adadelta, "var accum accum_update", "grad", "lr rho epsilon", kRows)     \
  X(Adagrad, "var accum", "grad", "lr", kRows)                               \
  X(Adam, "var m v", "grad",                                                 \
    "lr beta1 beta2 epsilon weight_decay use_nesterov? beta1_power "   \
    "beta2_power",                                                     \
    kAll)                                                                    \
  X(AdamWithAmsgrad, "var m v vhat", "grad",                                 \
    "lr beta1 beta2 epsilon weight_decay beta1_power "                 \
    "beta2_power",                                                     \
    kAll)                                                                    \
  X(CenteredRMSProp, "var mg rms mom", "grad", "lr rho momentum epsilon",    \
    kRows)                                                                   \
  X(Ema, "shadow", "value", "rate", kRows)                                   \
  X(Ftrl, "var accum linear", "grad", "lr l1 l2 l2_shrinkage", kRows)        \
  X(GradientDescent, "var", "grad", "lr", kRows)                             \
  X(Momentum, "var accum", "grad", "lr momentum use_nesterov?", kRows)       \
  X(RMSProp, "var rms mom", "grad", "lr rho momentum epsilon", kRows)        \
  X(WeightedSum, "sum", "source", "weight is_first", kRows)

namespace wrapopt {

enum class RuleId {
#define WRAPOPT_RULE_ID(rule, states, inputs, scalars, sparse) k##rule,
  WRAPOPT_RULES(WRAPOPT_RULE_ID)
#undef WRAPOPT_RULE_ID
};

enum class Sparse { kRows, kAll };

struct RuleInfo {
  RuleId id;
  const char* name;
  std::string_view states;
  std::string_view inputs;
  std::string_view scalars;
  Sparse sparse;
};

inline constexpr RuleInfo kRules[] = {
#define WRAPOPT_RULE_INFO(rule, states, inputs, scalars, sparse) \
  {RuleId::k##rule, #rule, states, inputs, scalars, Sparse::sparse},
    WRAPOPT_RULES(WRAPOPT_RULE_INFO)
#undef WRAPOPT_RULE_INFO
};

constexpr const RuleInfo& Info(RuleId rule) {
  return kRules[static_cast<int>(rule)];
}

// Names in a line of the list are separated by single spaces.
constexpr size_t CountNames(std::string_view names) {
  size_t count = names.empty() ? 0 : 1;
  for (const char c : names) count += c == ' ';
  return count;
}

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_RULES_H_
