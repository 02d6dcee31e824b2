// The XLA engine: every rule as operations of an XLA computation, for every
// number type and array shape. Knows nothing of TensorFlow.
#ifndef WRAPOPT_CC_KERNELS_ELEMENTWISE_XLA_H_
#define WRAPOPT_CC_KERNELS_ELEMENTWISE_XLA_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "cc/rules/rules.h"
#include "xla/hlo/builder/xla_builder.h"
#include "xla/hlo/builder/xla_computation.h"
#include "xla/xla_data.pb.h"

namespace wrapopt {

// The type that numbers are computed in which are stored as `storage`: float
// for half and bfloat16, else the same.
xla::PrimitiveType ComputeType(xla::PrimitiveType storage);

// Takes one step of a rule. `states` are stored as `storage`, before and after;
// `inputs`, of the states' shape, as any type. `scalars` have no dimension and
// are of the type that the step is computed in.
void Step(RuleId rule, xla::PrimitiveType storage,
          absl::Span<xla::XlaOp> states, absl::Span<const xla::XlaOp> inputs,
          absl::Span<const xla::XlaOp> scalars);

// The same array, as a reader of its storage sees it. XLA may leave out the
// conversion of a result to half or bfloat16 where it is converted back.
xla::XlaOp Stored(xla::XlaOp array, xla::PrimitiveType storage);

// A sparse gradient: rows for some of a variable's, in any order, of which
// several may be for one.
//
// A row whose index is out of range does not count, nor does one past the end
// of a gradient of dynamic size.
class Rows {
 public:
  // `storage` and `dimensions` are those of the variable, which has a row.
  Rows(xla::PrimitiveType storage, absl::Span<const int64_t> dimensions,
       xla::XlaOp grad, xla::XlaOp indices);

  // The same without gradients: rows that a step has changed.
  Rows(xla::PrimitiveType storage, absl::Span<const int64_t> dimensions,
       xla::XlaOp indices);

  // None counts unless `accept`.
  void Keep(xla::XlaOp accept);

  // These rows of an array of the variable's shape, one for each index.
  xla::XlaOp Get(xla::XlaOp array) const { return Gather(array, index_); }
  // The array with these rows, which are equal where their indices are.
  xla::XlaOp Put(xla::XlaOp array, xla::XlaOp rows) const;

  // These rows of a shadow, up to date: see CatchUpFn. `value` is what the
  // variable held in the steps that they lack.
  xla::XlaOp CaughtUp(xla::XlaOp shadow, xla::PrimitiveType shadow_storage,
                      xla::XlaOp value, xla::XlaOp log_decays) const;
  // The log decays after a step for these rows.
  xla::XlaOp Marked(xla::XlaOp log_decays, xla::XlaOp log_decay) const;

  // The whole gradient, zero where it has no row.
  xla::XlaOp Dense() const;

  // Takes the step of a rule for those rows of `states` that have a gradient:
  // the sum of all of that row.
  void Step(RuleId rule, absl::Span<xla::XlaOp> states,
            absl::Span<const xla::XlaOp> scalars) const;

 private:
  // With the rows at `index` of `updates` combined into the array's.
  xla::XlaOp Scatter(xla::XlaOp array, xla::XlaOp index, xla::XlaOp updates,
                     const xla::XlaComputation& combine,
                     bool unique = false) const;
  xla::XlaOp Gather(xla::XlaOp array, xla::XlaOp index) const;
  xla::XlaOp Zeros(int64_t rows) const;

  const xla::PrimitiveType storage_;
  const std::vector<int64_t> dimensions_;
  xla::PrimitiveType index_type_;
  xla::XlaOp grad_;
  xla::XlaOp index_;   // Of those that do not count, one past the last row.
  xla::XlaOp counts_;
  std::optional<xla::XlaOp> accept_;
  int64_t count_;
};

// A whole shadow, up to date.
xla::XlaOp CaughtUp(xla::XlaOp shadow, xla::PrimitiveType shadow_storage,
                    xla::XlaOp value, xla::XlaOp log_decays);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_ELEMENTWISE_XLA_H_
