// The list of update rules, which every back end registers.
//
// To add one: write cc/rules/<rule>.h, include it here and add its line to
// WRAPOPT_UPDATES, and add its formula to tests/support/numerics.py. The code
// needs no other edit: every back end, wrapopt.ops.apply and the tests read the
// rules here. cc/README.md says how to test it.
//
// The arguments of a rule's `Step` are its states as V&, then its inputs and
// then its scalars as const V&. Its code is pure data flow: Select instead of
// `if`, no loop, and the functions and literals of cc/rules/maths.h.
//
// A line names the arguments, in the order of `Step`. The op Apply takes states
// and scalars in this order. A scalar with a question mark, as `use_nesterov?`,
// is true or false: 1 or 0.
//
// Names of TensorFlow's and Keras's arguments keep to one spelling, as in the
// lines below: `weight_decay`, `beta1_power`. A rule of Keras's optimizers has
// `weight_decay`. Its name begins with Keras if TensorFlow's optimizer of that
// name computes other numbers.
//
// The last argument is the step with a sparse gradient:
//
//   kRows   updates only the rows in the gradient
//   kAll    updates all rows, with zero for rows that are not in the gradient;
//           the result is that of the dense gradient
//
// Choose the same as the optimizer in TensorFlow, else the one in Keras. If
// neither has the rule, choose kRows only if a gradient of zero changes no
// state except by an underflow, as in plain gradient descent: the result is
// then the same, and the step touches fewer rows. Choose kAll for other rules,
// such as a rule with a mean of gradients, which decays in each step.
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
#include "cc/rules/keras_adagrad.h"
#include "cc/rules/keras_centered_rms_prop.h"
#include "cc/rules/keras_momentum.h"
#include "cc/rules/keras_rms_prop.h"
#include "cc/rules/keras_sgd.h"
#include "cc/rules/lion.h"
#include "cc/rules/momentum.h"
#include "cc/rules/rms_prop.h"
#include "cc/rules/schedule_free.h"
#include "cc/rules/weighted_sum.h"

//  X(rule, states, inputs, scalars, sparse)
#define WRAPOPT_UPDATES(X)                                                   \
  X(Adadelta, "var accum accum_update", "grad", "lr rho epsilon", kRows)     \
  X(Adagrad, "var accum", "grad", "lr", kRows)                               \
  X(Adam, "var m v", "grad",                                                 \
    "lr beta1 beta2 epsilon weight_decay use_nesterov? beta1_power "         \
    "beta2_power",                                                           \
    kAll)                                                                    \
  X(AdamWithAmsgrad, "var m v vhat", "grad",                                 \
    "lr beta1 beta2 epsilon weight_decay beta1_power "                       \
    "beta2_power",                                                           \
    kAll)                                                                    \
  X(CenteredRMSProp, "var mg rms mom", "grad", "lr rho momentum epsilon",    \
    kRows)                                                                   \
  X(Ftrl, "var accum linear", "grad", "lr l1 l2 l2_shrinkage", kRows)        \
  X(GradientDescent, "var", "grad", "lr", kRows)                             \
  X(KerasAdagrad, "var accum", "grad", "lr epsilon weight_decay", kRows)     \
  X(KerasCenteredRMSProp, "var mg rms", "grad", "lr rho epsilon weight_decay",\
    kAll)                                                                    \
  X(KerasMomentum, "var velocity", "grad",                                   \
    "lr momentum weight_decay use_nesterov?", kAll)                          \
  X(KerasRMSProp, "var rms", "grad", "lr rho epsilon weight_decay", kAll)    \
  X(KerasSGD, "var", "grad", "lr weight_decay", kRows)                       \
  X(Lion, "var m", "grad", "lr beta1 beta2 weight_decay", kAll)              \
  X(Momentum, "var accum", "grad", "lr momentum use_nesterov?", kRows)       \
  X(PrimalAverageAdam, "var z m v", "grad",                                  \
    "lr beta1 beta2 epsilon weight_decay beta1_power beta2_power "           \
    "weight_decay_at_y pull push",                                           \
    kAll)                                                                    \
  X(RMSProp, "var rms mom", "grad", "lr rho momentum epsilon", kRows)        \
  X(ScheduleFreeAdagrad, "var z accum", "grad",                              \
    "lr epsilon weight_decay weight_decay_at_y pull push", kAll)             \
  X(ScheduleFreeAdam, "var z v", "grad",                                     \
    "lr beta2 epsilon weight_decay beta2_power weight_decay_at_y pull push", \
    kAll)                                                                    \
  X(ScheduleFreeRMSProp, "var z rms", "grad",                                \
    "lr rho epsilon weight_decay weight_decay_at_y pull push", kAll)         \
  X(ScheduleFreeSGD, "var z", "grad",                                        \
    "lr weight_decay weight_decay_at_y pull push", kAll)

// Rules that are stages before or after the step of another one.
#define WRAPOPT_STAGES(X)                                                    \
  X(Ema, "shadow", "value", "rate", kRows)                                   \
  X(WeightedSum, "sum", "source", "weight is_first", kRows)

#define WRAPOPT_RULES(X) WRAPOPT_UPDATES(X) WRAPOPT_STAGES(X)

// Rules that differ from another one only in the step with a sparse gradient.
// They have the other rule's mathematics and kernels.
//
// LazyAdam is Adam in which the moments of rows that are not in the gradient do
// not decay (tf.contrib.opt.LazyAdamOptimizer of TensorFlow 1.15).
//
//  X(rule, other, sparse)
#define WRAPOPT_SPARSE_VARIANTS(X) X(LazyAdam, Adam, kRows)

namespace wrapopt {

// The mathematics of a rule.
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

// Indexed by RuleId.
inline constexpr RuleInfo kRulesById[] = {
#define WRAPOPT_RULE_INFO(rule, states, inputs, scalars, sparse) \
  {RuleId::k##rule, #rule, states, inputs, scalars, Sparse::sparse},
    WRAPOPT_RULES(WRAPOPT_RULE_INFO)
};

constexpr const RuleInfo& Info(RuleId rule) {
  return kRulesById[static_cast<int>(rule)];
}

// The rules, and then the variants.
inline constexpr RuleInfo kRules[] = {
    WRAPOPT_RULES(WRAPOPT_RULE_INFO)
#undef WRAPOPT_RULE_INFO
#define WRAPOPT_VARIANT_INFO(rule, other, sparse)                   \
  {RuleId::k##other, #rule, Info(RuleId::k##other).states,          \
   Info(RuleId::k##other).inputs, Info(RuleId::k##other).scalars,   \
   Sparse::sparse},
    WRAPOPT_SPARSE_VARIANTS(WRAPOPT_VARIANT_INFO)
#undef WRAPOPT_VARIANT_INFO
};

// Whether a rule with this mathematics updates only the rows in a sparse
// gradient.
constexpr bool MayUpdateRows(RuleId id) {
  for (const RuleInfo& rule : kRules) {
    if (rule.id == id && rule.sparse == Sparse::kRows) return true;
  }
  return false;
}

// Counts names that are separated by single spaces.
constexpr size_t CountNames(std::string_view names) {
  size_t count = names.empty() ? 0 : 1;
  for (const char c : names) count += c == ' ';
  return count;
}

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_RULES_H_
