"""Public functions over the raw ops: many variables in one native call.

They take variables, not tensors: resource variables (the default of
TensorFlow 2) and the ref variables of TensorFlow 1 graphs. They run eagerly,
inside a `tf.function`, and in a `tf.Graph`.

XLA compiles `apply`, `averaging_assign`, `catch_up`, `ema_update`, `exchange`
and `sparse_ema_update` for CPU, GPU and TPU: in a
`tf.function(jit_compile=True)`, or by autoclustering. A compiled program
updates resource variables in place. On a CPU, it calls the CPU kernels of these
functions, except those of `averaging_assign` and of `exchange`. Everything else
is plain HLO. Its numbers agree with those of the CPU kernels to rounding,
except for subnormal numbers on a GPU.

The compiler refuses wrong shapes, wrong dtypes and constants out of range. If a
decay or an index is known only when the program runs, a CPU kernel refuses one
that is out of range. Plain HLO cannot refuse it: it ignores an index out of
range, and applies the formula to a decay, rate or weight out of range. XLA
leaves out a call whose variables have no elements, with its checks.

XLA does not compile `read_packed` and `assign_packed`. The functions whose
names begin with `staleness_`, and `begin_update`, are the parameter server's
side of asynchronous training. They run on the host only.

In a `tf.function` that XLA does not compile, `apply` and `ema_update` take the
handles of all their variables as one tensor, because each tensor that a
function captures costs time in every call. They run in program order with the
other ops on these variables. `tf.saved_model.save` saves such a `tf.function`
and `jit_compile=True` compiles it: both trace it again. Neither accepts a
concrete function of it.

Subnormal numbers are those between zero and the smallest normal number: 2^-126
in float32 and bfloat16, 2^-1022 in float64. Arithmetic in these dtypes takes
them as zero with their sign, as operands and as results. TensorFlow's own ops
and XLA do the same on a CPU, where subnormal numbers may be slow. Subnormal
float16 numbers are normal float32 numbers, and count. The GPU kernels flush
float32 and bfloat16 as TensorFlow's do, but not float64: a GPU has no such
mode. A program that XLA compiles for a GPU keeps subnormal float32 numbers too,
unless `XLA_FLAGS=--xla_gpu_ftz=true` is set. On a CPU a copy, such as that of
decay 0 or rate 1, keeps all bits. On a GPU a copy is arithmetic, too.
"""

from wrapopt.ops._apply import Update as Update  # For modules of wrapopt.
from wrapopt.ops._apply import apply
from wrapopt.ops._averaging_assign import averaging_assign
from wrapopt.ops._ema_update import ema_update
from wrapopt.ops._exchange import exchange
from wrapopt.ops._lazy_averages import catch_up
from wrapopt.ops._lazy_averages import sparse_ema_update
from wrapopt.ops._packed import assign_packed
from wrapopt.ops._packed import read_packed
from wrapopt.ops._staleness_gate import StalenessVerdict
from wrapopt.ops._staleness_gate import begin_update
from wrapopt.ops._staleness_gate import staleness_complete
from wrapopt.ops._staleness_gate import staleness_gate
from wrapopt.ops._staleness_gate import staleness_record

# For the other modules of wrapopt.
from wrapopt.ops._emit import device_of as device_of
from wrapopt.ops._emit import host_device as host_device
from wrapopt.ops._emit import host_of as host_of
from wrapopt.ops._emit import not_converted as not_converted
from wrapopt.ops._scalars import float64 as float64
from wrapopt.ops._scalars import together as together
from wrapopt.ops._staleness_gate import take_aborted_back as take_aborted_back
from wrapopt.ops._variables import is_ref as is_ref_variable

__all__ = [
    "StalenessVerdict",
    "apply",
    "assign_packed",
    "averaging_assign",
    "begin_update",
    "catch_up",
    "ema_update",
    "exchange",
    "read_packed",
    "sparse_ema_update",
    "staleness_complete",
    "staleness_gate",
    "staleness_record",
]
