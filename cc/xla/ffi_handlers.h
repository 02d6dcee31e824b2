// The kernels as functions that a program of XLA calls: those of the CPU, and
// for dense gradients those of an NVIDIA GPU.
//
// An op is one call for each MB of dense gradients, even if it has hundreds of
// variables. XLA itself would compile a loop for each variable and for each
// average.
//
// The operands of a call are the op's arrays, in the order below. The operands
// that the call writes are also its results: both have the same buffer.
// Programs in a cache on disk call by these names: operands in a new order need
// a new name.
#ifndef WRAPOPT_CC_XLA_FFI_HANDLERS_H_
#define WRAPOPT_CC_XLA_FFI_HANDLERS_H_

namespace wrapopt {

// Apply of dense gradients. The attribute "rule" is the rule's name. The rule
// has S states and C scalars. There are N variables, and K averages of each.
//
//   accept      pred
//   decays      f64[K]
//   scalars     f64[C]
//   states      S N arrays, written
//   shadows     K N arrays, written
//   grad        N arrays
inline constexpr char kApplyCall[] = "wrapopt_apply";

// Apply of sparse gradients. The attribute "names" has the variables' names for
// errors, separated by zero bytes.
//
//   accept      pred
//   decays      f64[K]
//   scalars     f64[C]
//   counts      s64[N]: only the first counts[i] rows of grad[i] count
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

// CatchUp, ReadAverages and SparseEmaUpdate. The attribute "n" is N. "names" is
// as above.
//
//   decays      f64[K], empty if there is no step
//   counts      s64[N], empty if there are no indices
//   shadows     K N arrays, written
//   log_decays  K N arrays, written
//   values      N arrays
//   indices     N vectors or none
inline constexpr char kMoveRowsCall[] = "wrapopt_move_rows";

// Apply of dense gradients, or EmaUpdate, on a GPU. The attribute "rule" is
// empty for EmaUpdate, which has no states, and one scalar: 1. The values are
// its inputs.
//
//   accept      pred
//   numbers     f64[C + K]: the scalars, and 1 - decay of each average
//   states      S N arrays, written
//   shadows     K N arrays, written
//   inputs      N arrays
inline constexpr char kGpuUpdateCall[] = "wrapopt_gpu_update";

}  // namespace wrapopt

#endif  // WRAPOPT_CC_XLA_FFI_HANDLERS_H_
