"""Types in the signatures of the public API, and dtypes."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Optional, TypeAlias, Union

import tensorflow as tf

from wrapopt import _native

# The dtypes of averages, and those whose numbers are computed in float32.
FLOATS = tuple(map(tf.as_dtype, _native.DTYPES))
LOW_PRECISION = tuple(dtype for dtype in FLOATS if dtype.size < 4)

Operation: TypeAlias = tf.Operation
Tensor: TypeAlias = tf.Tensor
Variable: TypeAlias = tf.Variable
V1Optimizer: TypeAlias = tf.compat.v1.train.Optimizer
SessionRunHook: TypeAlias = tf.compat.v1.train.SessionRunHook
# A MonitoredSession is not a subclass of Session.
Session: TypeAlias = Union[tf.compat.v1.Session,
                           tf.compat.v1.train.MonitoredSession]

# Python values, or scalar tensors or variables of such a dtype.
Bool: TypeAlias = Union[bool, Tensor]
Float: TypeAlias = Union[float, Tensor, Variable]
Integer: TypeAlias = Union[int, Tensor, Variable]

# A single variable is the same as a sequence of one.
Variables: TypeAlias = Union[Variable, Sequence[Variable]]
Gradient: TypeAlias = Union[Tensor, tf.IndexedSlices]
GradsAndVars: TypeAlias = Iterable[tuple[Optional[Gradient], Variable]]
Loss: TypeAlias = Union[Tensor, Callable[[], Tensor]]
