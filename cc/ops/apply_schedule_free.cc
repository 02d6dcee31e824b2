#include <string>

#include "absl/strings/str_cat.h"
#include "cc/ops/apply_op.h"

namespace wrapopt {
namespace {

bool Define(const char* rule, const char* around, const char* state,
            const char* scalars) {
  return DefineApplyOps(
      rule,
      absl::StrCat("Schedule-Free learning around ", around,
                   " (cc/rules/schedule_free.h)."),
      absl::StrCat(
          "\nvar: N variables of dtype T, at which gradients are taken: y.\n"
          "z: What the inner rule trains.\n",
          state, "lr: The learning rate.\n", scalars,
          "weight_decay: The part of z, times lr, that a step takes from z.\n"
          "weight_decay_at_y: The part of y, times lr, that a step takes from "
          "z.\n"
          "pull: The part of z - var that a step adds to var.\n"
          "push: The part of a step of z that it adds to var.\n"));
}

}  // namespace

const bool apply_schedule_free_defined =
    Define("ScheduleFreeSGD", "gradient descent", "", "") &&
    Define("ScheduleFreeAdam", "Adam with a beta1 of 0",
           "v: Second moments of the gradients.\n",
           "beta2: The decay of the second moments.\n"
           "epsilon: Added to the root of the second moments.\n"
           "beta2_power: beta2 to the power of the step, counted from 1.\n") &&
    Define("ScheduleFreeRMSProp", "RMSProp without momentum",
           "rms: Means of the squared gradients.\n",
           "rho: The decay of rms.\n"
           "epsilon: Added to rms, inside of the square root.\n") &&
    Define("ScheduleFreeAdagrad", "Adagrad",
           "accum: Sums of the squared gradients.\n",
           "epsilon: Added to accum, inside of the square root.\n");

}  // namespace wrapopt
