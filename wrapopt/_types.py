"""Types in the signatures of the public API."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Optional, TypeAlias, Union

import tensorflow as tf

Operation: TypeAlias = tf.Operation
Tensor: TypeAlias = tf.Tensor
Variable: TypeAlias = tf.Variable
V1Optimizer: TypeAlias = tf.compat.v1.train.Optimizer
SessionRunHook: TypeAlias = tf.compat.v1.train.SessionRunHook
# Or a monitored one, which is no subclass.
Session: TypeAlias = Union[tf.compat.v1.Session,
                           tf.compat.v1.train.MonitoredSession]

# A scalar tensor or variable of any such dtype will do, too.
Bool: TypeAlias = Union[bool, Tensor]
Float: TypeAlias = Union[float, Tensor, Variable]
Integer: TypeAlias = Union[int, Tensor, Variable]
String: TypeAlias = Union[str, Tensor]

# One variable may stand for a sequence of one.
Variables: TypeAlias = Union[Variable, Sequence[Variable]]
Gradient: TypeAlias = Union[Tensor, tf.IndexedSlices]
GradsAndVars: TypeAlias = Iterable[tuple[Optional[Gradient], Variable]]
Loss: TypeAlias = Union[Tensor, Callable[[], Tensor]]
