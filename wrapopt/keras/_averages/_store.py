"""The averages and counts of a wrapper, in variables of Keras.

An average that has not begun is its variable. Averages begin with the first
step that they follow. Until then, all that reads them, and the first step,
calls `seed_unbegun`.
"""

import numpy as np
import tensorflow as tf

from wrapopt import _types
from wrapopt._averages import _replicas
from wrapopt._averages import _write_check
from wrapopt.keras import _variables
from wrapopt.keras._averages import _state
from wrapopt.keras._steps import _views
from wrapopt.keras._variables import path_of, value_of


class Store:
  """What a wrapper keeps. Neither Keras nor TensorFlow tracks this object.

  Attributes:
    state: The `_state.State` that saves and restores it.
    write_check: Refuses a checkpoint that cannot hold it.
    rows: For each decay, {key of a variable: its average}.
    counts: {`Step.part`: a count}, see `make_counts`.
    part_of: {key of a variable: the key of its count in `counts`}.
    statistics: The `Statistics` of a model whose averages it keeps, or None.
    without_gradient: The keys of variables that had no gradient in this
      process. The average of one that is not frozen is its value, which the
      user's code may change.
  """

  def __init__(self, optimizer):
    self._optimizer = optimizer
    # Keras saves the state under the name of its class.
    kind = type(optimizer).__name__
    self.state = type(f"{kind}Averages", (_state.State,), {})(
        f"wrapopt_{kind}", optimizer._settle, self._all_steps)
    self.write_check = _write_check.WriteCheck(optimizer._check_writable)
    self.rows, self.counts, self.part_of = [], {}, {}
    self.without_gradient = set()
    self.statistics = None
    self._begun = None  # Or the variable that tells it, which a step sets.
    # Whether, in this process, the averages were settled for a step, and marked
    # as begun.
    self._is_seeded = self._is_marked = False

  def _all_steps(self):
    return [steps_of(opt) for opt in _views.innermost(self._optimizer)]

  # Making them

  def make_row(self, name, variables, dtype_of=None, wrap=None, start=None):
    """Makes variables that start at the values of others, if these have one.

    Args:
      name: The kind of the new variables, such as "average".
      variables: {index: trained variable}, as in `_state.State.add`.
      dtype_of: A function of a variable that returns the dtype of its average;
        by default its own.
      wrap: A function of a new `keras.Variable` and its variable that returns
        what stands for the average; by default an `Average`.
      start: None, or a number: then they are scalars that start at this.

    Returns:
      {key of a variable: its average}.
    """
    row = {}
    for i, v in variables.items():
      dtype = dtype_of(v) if dtype_of else value_of(v).dtype
      with self._optimizer._distribution_strategy.extended.colocate_vars_with(
          value_of(v)):
        new = self._optimizer.add_variable(
            shape=v.shape if start is None else (),
            dtype=tf.as_dtype(dtype).name, initializer=_initializer(v, start),
            name=f"{path_of(v).replace('/', '_')}_{name}")
      average = wrap(new, v) if wrap else _variables.Average.of(new)
      if start is not None:
        average.starts_at = start
      self.state.add(name, average, v, i)
      row[self._optimizer._var_key(v)] = average
    return row

  def make_count(self, name, value, seeded=None, *, dtype="int64", near=None,
                 **kwargs):
    """Makes a variable that is saved and restored with the averages.

    Args:
      name: Its name.
      value: Its value at the start, and if a file lacks it.
      seeded: Its value after averages are seeded; by default `value`.
      dtype: Its dtype.
      near: In a cluster, a tf.Variable on the server where it is made; by
        default that of `iterations`.
      **kwargs: `swapped_in`: a function that maps its value to the one that is
        saved while averages are in place. `in_files`: a `_state.InFiles`.

    Returns:
      A `keras.Variable`.
    """
    with _replicas.colocated(
        value_of(self._optimizer._iterations) if near is None else near):
      count = _variables.StateVariable.of(self._optimizer.add_variable(
          shape=np.shape(value), dtype=dtype, name=name,
          initializer=lambda shape, dtype: tf.constant(value, dtype, shape)))
    self.state.add_count(name, count, _state.CountValues(
        value, value if seeded is None else seeded, **kwargs))
    return count

  def make_counts(self, name, *args, in_files=None, **kwargs):
    """Makes `counts`, one for each optimizer in `parts`.

    Args:
      name: The name of the first one.
      *args: Arguments of `make_count`.
      in_files: None, or a function of an optimizer and the end of its count's
        name that returns a `_state.InFiles`.
      **kwargs: Further ones.
    """
    for i, (part, opt) in enumerate(self.parts().items()):
      end = f"_{i}" if i else ""
      self.counts[part] = self.make_count(
          name + end, *args, in_files=in_files and in_files(opt, end), **kwargs)
      self.part_of.update(dict.fromkeys(
          map(opt._var_key, opt._trainable_variables), part))

  def parts(self):
    """{`Step.part`: optimizer} of the optimizers inside that take steps.

    There are several in a MultiOptimizer. One that trains nothing takes none.
    """
    return {opt._var_key(opt._trainable_variables[0]): opt
            for opt in _views.innermost(self._optimizer)
            if opt.built and opt._trainable_variables}

  # Their first step

  def make_begun(self):
    """Makes the variable that tells whether the averages have begun: 0 or 1."""
    self._begun = self.make_count("begun", 0, seeded=1)

  def has_begun(self):
    """Whether the averages have begun: a bool."""
    told_by = self.counts.values() if self._begun is None else [self._begun]
    return any(int(count.numpy()) for count in told_by)

  def may_begin(self):
    """Whether the next step may mark the averages as begun."""
    return self._begun is not None and not self._is_marked

  def mark_begun(self):
    """Notes, in a step, that the averages have begun."""
    if tf.executing_eagerly():
      if self._is_marked:
        return
      self._is_marked = True
    with _replicas.near(self._begun.value):
      self._begun.value.assign(1)

  def seed_unbegun(self):
    """Sets averages that have not begun to their variables' values."""
    if not self._optimizer.built or self.state.block.is_entered():
      return
    with tf.init_scope():
      self.state.complete()
      # A wrapper without averages has nothing that begins.
      if self.state.pairs() and not self.has_begun():
        self.state.seed_values()
      elif self.without_gradient:
        self.state.seed_values(
            lambda average, v: v.trainable and
            self._optimizer._var_key(v) in self.without_gradient and
            not self.state.was_set(average))

  def prepare(self, keys):
    """Prepares the averages for a step, when it is taken or traced.

    Args:
      keys: Those of the variables that have a gradient.
    """
    if self.statistics is not None:
      self.statistics.prepare()
    # The first replica prepares those of all, before any weight has changed. In
    # eager mode, its weights have decayed when the next one comes here.
    if not _replicas.is_first():
      return
    if self.state.has_new_values():
      self._is_seeded = self._is_marked = False
    # An eager step may only accumulate, or fail, before the first one that the
    # averages follow.
    if not self._is_seeded or self.may_begin() and tf.executing_eagerly():
      self.seed_unbegun()
      # Variables of a model that is built in a tf.function have no value yet.
      # TensorFlow traces the function again, and gives them values in between,
      # if it can.
      with tf.init_scope():
        self._is_seeded = all(value_of(v).is_initialized()
                              for v in self._optimizer._trainable_variables)
      self.state.waiting.start_in_graph()
    elif not self.without_gradient.isdisjoint(keys):
      self.seed_unbegun()
    self.without_gradient.difference_update(keys)

  def found(self, variable, *rows):
    """The average of a variable in the first row that has it."""
    key = self._optimizer._var_key(variable)
    for row in rows:
      if key in row:
        return row[key]
    raise KeyError(
        f"`variable` must be one that this {type(self._optimizer).__name__} was"
        f" built with, got '{path_of(variable)}'. A copy of a model has "
        "variables of its own.")


def _initializer(variable, start):
  value = value_of(variable)
  if start is None and not value.is_initialized():
    return "zeros"
  return lambda shape, dtype: (
      tf.cast(value, dtype) if start is None else tf.constant(start, dtype))


def steps_of(opt):
  """The number of steps that an optimizer has taken: an int."""
  return int(tf.convert_to_tensor(opt.iterations))


def float32_for_half(variable):
  """The dtype of averages: float32 for float16 and bfloat16, else its own."""
  dtype = tf.as_dtype(variable.dtype)
  return tf.float32 if dtype in _types.LOW_PRECISION else dtype
