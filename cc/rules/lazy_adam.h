// Adam that leaves rows alone which a sparse gradient lacks: their moments do
// not decay (TensorFlow 1.15's tf.contrib.opt.LazyAdamOptimizer). With a dense
// gradient it is Adam.
#ifndef WRAPOPT_CC_RULES_LAZY_ADAM_H_
#define WRAPOPT_CC_RULES_LAZY_ADAM_H_

#include "cc/rules/adam.h"

namespace wrapopt {

struct LazyAdam : Adam {};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_LAZY_ADAM_H_
