// The CPU's kernels as functions that a program of XLA calls: for each op one
// call, whatever the number of its variables.
//
// XLA would make a loop of each variable and of each average, and a step of
// training has hundreds of them. Such a call has for operands the op's arrays,
// in the order that stands below, and for results those that it writes: they are
// in the buffers of these operands.
#ifndef WRAPOPT_CC_KERNELS_CALLS_H_
#define WRAPOPT_CC_KERNELS_CALLS_H_

namespace wrapopt {

// Apply<Rule>, for the attribute "rule", the rule's name. S states, C scalars, K
// averages of each of N variables.
//
//   accept      pred
//   decays      f64[K]
//   scalars     f64[C]
//   states      S N arrays, written
//   shadows     K N arrays, written
//   grad        N arrays
inline constexpr char kApplyCall[] = "wrapopt_apply";

// SparseApply<Rule>. The attribute "names" has what errors call the variables, a
// zero byte between two.
//
//   accept      pred
//   decays      f64[K]
//   scalars     f64[C]
//   counts      s64[N], of the gradients that count: the first of each array
//   states      S N arrays, written
//   shadows     K N arrays, written
//   log_decays  none or K N arrays, written
//   grad        N arrays
//   indices     N vectors
inline constexpr char kSparseApplyCall[] = "wrapopt_sparse_apply";

// EmaUpdate.
//
//   decays      f64[K]
//   shadows     K N arrays, written
//   values      N arrays
inline constexpr char kEmaUpdateCall[] = "wrapopt_ema_update";

// CatchUp and SparseEmaUpdate, for "names" as above and N, the attribute "n".
//
//   decays      f64[K], empty for CatchUp
//   counts      s64[N], empty if there are no indices
//   shadows     K N arrays, written
//   log_decays  K N arrays, written
//   values      N arrays
//   indices     N vectors or none
inline constexpr char kMoveRowsCall[] = "wrapopt_move_rows";

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_CALLS_H_
