// Adam that updates only the rows in a sparse gradient: the moments of other
// rows do not decay (tf.contrib.opt.LazyAdamOptimizer of TensorFlow 1.15). With
// a dense gradient it is Adam.
#ifndef WRAPOPT_CC_RULES_LAZY_ADAM_H_
#define WRAPOPT_CC_RULES_LAZY_ADAM_H_

#include "cc/rules/adam.h"

namespace wrapopt {

struct LazyAdam : Adam {};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_RULES_LAZY_ADAM_H_
