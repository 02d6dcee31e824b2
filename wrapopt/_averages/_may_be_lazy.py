"""Which variables may have averages whose rows lag behind."""

import itertools
import warnings

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.ops import resource_variable_ops

from wrapopt import ops
from wrapopt._averages import _replicas
from wrapopt.ops import _lagging

# Made outside of a tf.function, and while one is traced.
_PLAIN = (resource_variable_ops.ResourceVariable,
          polymorphic_function.UnliftedInitializerVariable)

# Counts the calls of `tell_of_resource_variables`.
_told = itertools.count()


def checked_argument(lazy):
  """The argument `lazy` of an optimizer, checked."""
  if lazy is not None and lazy is not False:
    raise ValueError(
        "`lazy` must be None (rows lag behind where that is exact) or False "
        f"(never), got {lazy!r}.")
  return lazy


def may_be_lazy(variable):
  """Whether a LazyAverage of `variable` can be made here.

  Not of a ref variable. All of its ops, such as those of a Saver, write into
  its buffer, where no later step or read could see that it has changed.
  """
  return ((type(variable) in _PLAIN or _replicas.is_shared(variable)) and
          _may_lag(variable))


def is_hindered_by_ref(variable):
  """Whether `may_be_lazy` is False only because of a ref variable."""
  return _may_lag(variable) and ops.is_ref_variable(variable)


def tell_of_resource_variables(variable):
  """Warns, once in a process, that averages of a ref variable are slow.

  Args:
    variable: A variable for which `is_hindered_by_ref` is True.
  """
  if next(_told) == 0:
    warnings.warn(
        f"Each step updates all rows of the averages of '{variable.name}', "
        "because it is a ref variable. Call "
        "tf.compat.v1.enable_resource_variables() before variables are made: "
        "then a step with a sparse gradient updates only the rows that it "
        "touches, at the same names and checkpoints. Code of yours that "
        "changes the variable must then read its averages before (see "
        "wrapopt/docs/embeddings.md). To keep ref variables without this "
        "warning, which is given once, pass `lazy=False`.")


def _may_lag(variable):
  return (variable.shape.is_fully_defined() and
          variable.shape.rank > 0 and not _replicas.share_steps() and
          not _lagging.is_changed_in_graph(variable) and
          tf.DeviceSpec.from_string(variable.device).device_type in (
              None, "CPU", "GPU"))
