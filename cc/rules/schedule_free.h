// Schedule-Free learning around another rule (Defazio et al., "The road less
// scheduled", NeurIPS 2024, arXiv 2405.15682), and generalized primal averaging
// (Defazio et al., "Smoothing DiLoCo with primal averaging for faster training
// of LLMs", 2025, arXiv 2512.17131), which differ in c.
//
// The rule trains z. x is an average of all z, which one evaluates. Gradients
// are taken at y, which is between the two and which the variable holds:
//
//   y  = (1 - beta) z + beta x
//   z' = step of the rule from z - lr weight_decay_at_y y
//   x' = (1 - c) x + c z'
//   y' = (1 - beta) z' + beta x'
//
// x is in no memory, since it follows from y and z. Without it,
//
//   y' = y + pull (z - y) + push (z' - z)
//   pull = c                     push = 1 - beta (1 - c)
//
// In primal averaging, beta is mu_y and 1 - c is the constant mu_x.
//
// The caller computes pull and push, and may pull by another number if the
// variable holds another point between x and z.
//
// z has the place that var has in the other rule.
#ifndef WRAPOPT_CC_RULES_SCHEDULE_FREE_H_
#define WRAPOPT_CC_RULES_SCHEDULE_FREE_H_

#include "cc/rules/adam.h"
#include "cc/rules/keras_adagrad.h"
#include "cc/rules/keras_rms_prop.h"
#include "cc/rules/keras_sgd.h"
#include "cc/rules/maths.h"
#include "cc/rules/rule.h"

namespace wrapopt {

struct ScheduleFree {
  // Where the step of the other rule starts.
  template <class V>
  WRAPOPT_RULE static V Start(const V& var, const V& z, const V& lr,
                              const V& weight_decay_at_y) {
    return z - lr * weight_decay_at_y * var;
  }

  // Moves var after the step of the other rule from z to `stepped`.
  template <class V>
  WRAPOPT_RULE static void Move(V& var, V& z, const V& stepped, const V& pull,
                                const V& push) {
    var = var + pull * (z - var) + push * (stepped - z);
    z = stepped;
  }
};

struct ScheduleFreeSGD {
  template <class V>
  WRAPOPT_RULE static void Step(V& var, V& z, const V& grad, const V& lr,
                                const V& weight_decay,
                                const V& weight_decay_at_y, const V& pull,
                                const V& push) {
    V stepped = ScheduleFree::Start(var, z, lr, weight_decay_at_y);
    KerasSGD::Step(stepped, grad, lr, weight_decay);
    ScheduleFree::Move(var, z, stepped, pull, push);
  }
};

struct PrimalAverageAdam {
  template <class V>
  WRAPOPT_RULE static void Step(V& var, V& z, V& m, V& v, const V& grad,
                                const V& lr, const V& beta1, const V& beta2,
                                const V& epsilon, const V& weight_decay,
                                const V& beta1_power, const V& beta2_power,
                                const V& weight_decay_at_y, const V& pull,
                                const V& push) {
    V stepped = ScheduleFree::Start(var, z, lr, weight_decay_at_y);
    Adam::Step(stepped, m, v, grad, lr, beta1, beta2, epsilon, weight_decay,
               /*use_nesterov=*/ScalarLike(lr, 0), beta1_power, beta2_power);
    ScheduleFree::Move(var, z, stepped, pull, push);
  }
};

// Adam with a beta1 of 0: its first moment is the gradient.
struct ScheduleFreeAdam {
  template <class V>
  WRAPOPT_RULE static void Step(V& var, V& z, V& v, const V& grad, const V& lr,
                                const V& beta2, const V& epsilon,
                                const V& weight_decay, const V& beta2_power,
                                const V& weight_decay_at_y, const V& pull,
                                const V& push) {
    const V zero = ScalarLike(lr, 0);
    V m = grad;
    PrimalAverageAdam::Step(var, z, m, v, grad, lr, /*beta1=*/zero, beta2,
                            epsilon, weight_decay, /*beta1_power=*/zero,
                            beta2_power, weight_decay_at_y, pull, push);
  }
};

struct ScheduleFreeRMSProp {
  template <class V>
  WRAPOPT_RULE static void Step(V& var, V& z, V& rms, const V& grad,
                                const V& lr, const V& rho, const V& epsilon,
                                const V& weight_decay,
                                const V& weight_decay_at_y, const V& pull,
                                const V& push) {
    V stepped = ScheduleFree::Start(var, z, lr, weight_decay_at_y);
    KerasRMSProp::Step(stepped, rms, grad, lr, rho, epsilon, weight_decay);
    ScheduleFree::Move(var, z, stepped, pull, push);
  }
};

struct ScheduleFreeAdagrad {
  template <class V>
  WRAPOPT_RULE static void Step(V& var, V& z, V& accum, const V& grad,
                                const V& lr, const V& epsilon,
                                const V& weight_decay,
                                const V& weight_decay_at_y, const V& pull,
                                const V& push) {
    V stepped = ScheduleFree::Start(var, z, lr, weight_decay_at_y);
    KerasAdagrad::Step(stepped, accum, grad, lr, epsilon, weight_decay);
    ScheduleFree::Move(var, z, stepped, pull, push);
  }
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_SCHEDULE_FREE_H_
