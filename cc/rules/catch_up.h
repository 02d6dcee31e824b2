// How rows of an average catch up with the steps that they have missed.
//
// In a step, a row of an average s moves towards its value v (cc/rules/ema.h).
// If the value stays the same in all steps that a row misses, one step replaces
// them:
//
//   s'  = s + rate (v - s),   rate = 1 - exp(lag)
//   lag = all_steps - log_decay
//
//   log_decay  the sum of log(decay) over all steps until the row was last up
//              to date, one number for each row
//   all_steps  the sum of log(decay) over all steps until now
//
// So lag, which is not positive, is the sum over the missed steps.
#ifndef WRAPOPT_CC_RULES_CATCH_UP_H_
#define WRAPOPT_CC_RULES_CATCH_UP_H_

#include "cc/rules/maths.h"
#include "cc/rules/rule.h"

namespace wrapopt {

struct CatchUp {
  // No lag is less: the rate of this one is 1. log(0) counts as this number.
  static constexpr double kLeastLag = kLeastExponent;

  // The rounding error of a lag is that of the sums. So if the sum over all
  // steps is less than this, it becomes kRebased and the rows keep their lags.
  // kRebased is not zero: zero means that no row lags behind.
  static constexpr double kLeastSum = -1e4;
  static constexpr double kRebased = -1;

  template <class V>
  WRAPOPT_RULE static V Lag(const V& all_steps, const V& log_decay) {
    return all_steps - log_decay;
  }

  template <class V>
  WRAPOPT_RULE static V Rate(const V& lag) {
    return OneMinusExp(lag);
  }

  template <class V>
  WRAPOPT_RULE static auto MustRebase(const V& all_steps) {
    return Gt(ScalarLike(all_steps, kLeastSum), all_steps);
  }

  // The log_decay of a row when all_steps becomes kRebased.
  template <class V>
  WRAPOPT_RULE static V Rebased(const V& all_steps, const V& log_decay) {
    const V lag = Lag(all_steps, log_decay);
    return ScalarLike(lag, kRebased) - Max(lag, ScalarLike(lag, kLeastLag));
  }
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_CATCH_UP_H_
