// Defines the ops of an update rule: Wrapopt>Apply<Rule>, its sparse form, and
// the versions of both for ref variables.
#ifndef WRAPOPT_CC_OPS_APPLY_OP_H_
#define WRAPOPT_CC_OPS_APPLY_OP_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cc/rules/rules.h"

namespace wrapopt {

// `rule` is the rule's name in cc/rules/rules.h. `summary` is the first line of
// the ops' documentation. `details` documents the states and scalars of the
// rule, with one line "name: description" for each.
bool DefineApplyOps(const char* rule, const std::string& summary,
                    const std::string& details);

// The rule of that name, which updates a `var` by a `grad`.
absl::Status FindUpdate(absl::string_view name, const RuleInfo** rule);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_OPS_APPLY_OP_H_
