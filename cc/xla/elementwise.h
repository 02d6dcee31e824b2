// The XLA engine: every rule as operations of an XLA computation, for every
// number type and array shape. Does not depend on TensorFlow.
#ifndef WRAPOPT_CC_XLA_ELEMENTWISE_H_
#define WRAPOPT_CC_XLA_ELEMENTWISE_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "cc/rules/rules.h"
#include "xla/hlo/builder/xla_builder.h"
#include "xla/hlo/builder/xla_computation.h"
#include "xla/xla_data.pb.h"

namespace wrapopt {

// The compute type of numbers that are stored as `storage`: float for half and
// bfloat16, else the same.
xla::PrimitiveType ComputeType(xla::PrimitiveType storage);

// Takes one step of a rule. `states` are stored as `storage`, before and after.
// `inputs` have the states' shape and any type. `scalars` have no dimension and
// the compute type.
void Step(RuleId rule, xla::PrimitiveType storage,
          absl::Span<xla::XlaOp> states, absl::Span<const xla::XlaOp> inputs,
          absl::Span<const xla::XlaOp> scalars);

// The array after rounding to its storage type. XLA may omit the conversion of
// a result to half or bfloat16 if it is converted back.
xla::XlaOp Stored(xla::XlaOp array, xla::PrimitiveType storage);

// A sparse gradient: gradients of some rows of a variable, in any order. A row
// may have several.
//
// A gradient whose index is out of range does not count, and neither does one
// past the end of a gradient of dynamic size.
class Rows {
 public:
  // `storage` and `dimensions` are those of the variable, which must have rows.
  Rows(xla::PrimitiveType storage, absl::Span<const int64_t> dimensions,
       xla::XlaOp grad, xla::XlaOp indices);

  // Without gradients: the rows that a step has changed.
  Rows(xla::PrimitiveType storage, absl::Span<const int64_t> dimensions,
       xla::XlaOp indices);

  // If `accept` is false, no row counts.
  void Keep(xla::XlaOp accept);

  // These rows of an array of the variable's shape, one for each index.
  xla::XlaOp Get(xla::XlaOp array) const { return Gather(array, index_); }
  // The array with these rows, which are equal where their indices are.
  xla::XlaOp Put(xla::XlaOp array, xla::XlaOp rows) const;

  // These rows of an array that will be written to, in memory of their own. If
  // an op read them from the array later, XLA would copy the whole array.
  xla::XlaOp Old(xla::XlaOp array) const;
  // The same of log decays, and then their sum over all steps.
  xla::XlaOp OldLogs(xla::XlaOp log_decays) const;

  // These rows of a shadow after they caught up: see MoveRowsFn. `old` are the
  // rows of the variable's value in the missed steps.
  xla::XlaOp CaughtUp(xla::XlaOp shadow, xla::PrimitiveType shadow_storage,
                      xla::XlaOp old, xla::XlaOp old_logs) const;
  // The log decays after a step for these rows.
  xla::XlaOp Marked(xla::XlaOp log_decays, xla::XlaOp old_logs,
                    xla::XlaOp log_decay) const;

  // The whole gradient, zero where it has no row.
  xla::XlaOp Dense() const;

  // Takes the step of a rule for the rows of `states` that have gradients, with
  // the sum of each row's gradients. `old` are these rows of the first state.
  void Step(RuleId rule, absl::Span<xla::XlaOp> states,
            absl::Span<const xla::XlaOp> scalars, xla::XlaOp old) const;

 private:
  // The sum of each row's gradients, and its row: the row past the last where
  // there is no sum. `position` is that of one of its gradients.
  struct Sums {
    xla::XlaOp grad;
    xla::XlaOp index;
    xla::XlaOp position;
  };
  Sums Sum() const;
  // The array with `updates` combined into its rows `index`.
  xla::XlaOp Scatter(xla::XlaOp array, xla::XlaOp index, xla::XlaOp updates,
                     const xla::XlaComputation& combine,
                     bool unique = false) const;
  xla::XlaOp Gather(xla::XlaOp array, xla::XlaOp index) const;
  xla::XlaOp Zeros(int64_t rows) const;
  // A copy of the array in memory of its own.
  xla::XlaOp Kept(xla::XlaOp array) const;

  const xla::PrimitiveType storage_;
  const std::vector<int64_t> dimensions_;
  xla::PrimitiveType index_type_;
  xla::XlaOp grad_;
  xla::XlaOp index_;   // One past the last row if the gradient does not count.
  xla::XlaOp counts_;
  std::optional<xla::XlaOp> accept_;
  int64_t count_;
};

// A whole shadow after it caught up.
xla::XlaOp CaughtUp(xla::XlaOp shadow, xla::PrimitiveType shadow_storage,
                    xla::XlaOp value, xla::XlaOp log_decays);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_XLA_ELEMENTWISE_H_
