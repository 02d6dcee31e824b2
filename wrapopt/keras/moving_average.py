"""Moving averages of the weights that a Keras optimizer trains."""

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import functools
import numbers
from typing import Any, Optional, Union

import keras
import numpy as np
import tensorflow as tf

from wrapopt import _checks
from wrapopt import _types
from wrapopt import ops
from wrapopt._averages import _decay
from wrapopt._averages import _decays
from wrapopt._averages import _lazy
from wrapopt._averages import _may_be_lazy
from wrapopt._averages import _plan
from wrapopt.keras import _variables
from wrapopt.keras import _wrapper
from wrapopt.keras._averages import _averaging
from wrapopt.keras._averages import _public_methods
from wrapopt.keras._averages import _first_step
from wrapopt.keras._averages import _last_file
from wrapopt.keras._averages import _statistics
from wrapopt.keras._averages import _store
from wrapopt.keras._steps import _rules
from wrapopt.keras._steps import _views
from wrapopt.keras._variables import path_of, value_of

# Configurations hold them.
for _cls in _decay.BEMA, _decay.HalfLife, _decay.PowerDecay:
  keras.saving.register_keras_serializable("wrapopt")(_cls)


@keras.saving.register_keras_serializable("wrapopt")
class MovingAverage(_public_methods.PublicMethods,
                    _wrapper.WrapperOptimizer):
  """Keeps exponential moving averages of the weights that it trains.

  After each step of the inner optimizer that changes weights, the average `s`
  of each variable `v` that had a gradient moves:

      s += (1 - decay) (v - s)

  A step that only accumulates gradients, or that loss scaling skips, moves no
  average. An average starts at the value of its variable before the first step,
  or the variable's first gradient: until then, it is that variable, whatever
  sets it. (In a `tf.function`, it is the variable when the function is traced.
  Read the average if you set the variable after the trace, and before the first
  step that moves averages.)

  If the inner optimizer is exactly one of Keras's SGD, Adam, AdamW, Adagrad,
  RMSprop and Lion, one native op takes its step, its weight decay and all
  averages in one pass over memory (`fused`). Around any other optimizer, one op
  updates the averages after its step. The same holds for sparse gradients of
  Adam, AdamW, Adagrad and RMSprop, unless `sum_duplicates` is set.

  A step with the sparse gradient of an embedding costs only the rows that it
  touches, if the inner optimizer does not change the other rows (`is_lazy`).
  The averages of the other rows catch up, exactly, with the steps that they
  missed before an average is read, saved or put in place, and before any other
  code of this package changes the variable. Before your own code changes it,
  read its averages, or set `lazy=False`: rows can only catch up with a value
  that is still there.

  Example:

  >>> w = keras.Variable([1.0])
  >>> opt = wrapopt.keras.MovingAverage(keras.optimizers.SGD(1.0), 0.5)
  >>> opt.apply([tf.constant([1.0])], [w])
  >>> w.numpy(), opt.average(w).numpy()
  (array([0.], dtype=float32), array([0.5], dtype=float32))
  >>> with opt.averaged_weights():
  ...   print(w.numpy())
  [0.5]

  In a model: `model.compile(wrapopt.keras.MovingAverage("adam"), ...)`.

  A new program shapes its averages by `average_decay` alone: by a `HalfLife`, a
  `BEMA`, or a `PowerDecay`, which needs no start, because it forgets the first
  steps by itself. `num_updates`, `start_step` and `dynamic_decay` are those of
  TensorFlow Addons, for programs that have them.

  References: Polyak and Juditsky, "Acceleration of stochastic approximation by
  averaging", 1992; `tfa.optimizers.MovingAverage` of TensorFlow Addons.

  Differences from TensorFlow Addons: any Keras 3 optimizer; several decays;
  clipping and accumulation of the inner optimizer; `num_updates` is read in
  each step; `averaged_weights` is exact and works everywhere, and replaces
  `shadow_copy`, `swap_weights` and `assign_average_vars`.
  """

  in_op = True

  def __init__(
      self, optimizer: Union[str, dict[str, Any], keras.optimizers.Optimizer],
      average_decay: Union[_decay.Decay, Sequence[_decay.Decay]] = 0.99,
      num_updates: Any = None, start_step: int = 0, dynamic_decay: bool = False,
      name: Optional[str] = None, *, shadow_dtype: Any = None,
      average_batch_norm: Union[bool, Callable[[Any], bool]] = False,
      lazy: Optional[bool] = None,
      keep_raw_weights: bool = False,
      sum_duplicates: bool = False, variables: Any = None,
      update_every: int = 1) -> None:
    """Wraps `optimizer`.

    Args:
      optimizer: A Keras optimizer, or its name or configuration.
      average_decay: A number in [0, 1], a `wrapopt.PowerDecay`, a
        `wrapopt.HalfLife` or a `wrapopt.BEMA`, or a sequence of different ones,
        one for each average. Files hold an average by its decay: with another
        decay, it starts at its variable's value. With a BEMA, no other
        optimizer inside or around this one may put averages in the weights.
      num_updates: A count n of updates: a number, or a variable or callable
        that is read in each step. It limits decays that are numbers, also that
        of `HalfLife(steps=...)`, to at most `(1 + n) / (10 + n)`. It does not
        limit a PowerDecay, which `HalfLife(fraction=...)` is, too. It is read
        before `iterations` counts the step; `dynamic_decay` counts the steps
        themselves. A model with a variable, or with a function that is not
        registered by `keras.saving.register_keras_serializable`, cannot be
        saved as a whole: use `save_weights`.
      start_step: The number of steps before averaging begins. Until then, an
        average equals its variable: all decays are 0. The inner optimizer may
        have trained before: its `iterations` counts the earlier steps, too. The
        t of a PowerDecay counts steps from `start_step`.
      dynamic_decay: Whether decays that are numbers, as for `num_updates`, are
        limited to at most `(1 + t) / (10 + t)`, where t is `iterations` before
        the step less `start_step`: 0 in the first step, if the inner optimizer
        has not trained before. A PowerDecay is not limited.
      name: The name of the optimizer.
      shadow_dtype: The dtype of the averages, such as "float32"; by default
        float32 for float16 and bfloat16 variables, and the variable's own for
        others. A float16 or bfloat16 average hardly moves at decays near 1.
      average_batch_norm: Whether the moving statistics of batch normalizations
        are averaged and put in place together with the weights. By default,
        averaged weights are evaluated with the statistics of the raw weights.
        True averages those of the layers that this optimizer trains: it trains
        their gamma or beta. A layer that is not frozen, but has neither to
        train, belongs to the innermost layer around it that has other weights,
        of which the optimizer must train some. So another network in the model,
        such as a teacher that follows by your own code, keeps its statistics.
        A function of a layer that returns True or False chooses other layers. A
        model is saved with the function if that is registered by
        `keras.saving.register_keras_serializable`. The optimizer must know the
        model: pass `fit` the callback `EvaluateWithAverages`, or call
        `set_model(model)`. As an alternative,
        `EvaluateWithAverages(recalibrate=dataset)` and `recalibrate_batch_norm`
        compute the statistics that fit the averages. With a BEMA, the average
        of a statistic is not corrected: a variance could become negative.
      lazy: Whether the averages of rows that a sparse gradient does not touch
        may lag behind until they are read. By default (None), where that is
        exact (`is_lazy`). If False, each step moves all rows, and `average`
        always returns a `keras.Variable`.
      keep_raw_weights: Whether `fit` ends with the raw weights in the model. By
        default, it ends with the averages.
      sum_duplicates: If a batch names a row of an embedding several times,
        whether the row's gradients are summed before Adam, AdamW, Adagrad or
        RMSprop squares them, as `LazyAdam` does. One op then takes the step,
        which is faster. By default, the inner optimizer takes this step, with
        its own numbers: Keras squares each gradient and sums the squares.
      variables: Which variables are averaged; by default all. A function of a
        variable that returns True or False, or a list of variables or of their
        paths. A path may lack its first parts: "dense/kernel" is the path of
        "sequential/dense/kernel", if no other variable has it. The others are
        trained in the same way, and an evaluation uses them as they are. They
        have no average, at no cost. A model is saved with the paths of a list,
        which must then be unique; a function must be registered by
        `keras.saving.register_keras_serializable`. An average that a file lacks
        starts at its variable's value, with a warning. The statistics of
        `average_batch_norm` are no weights, and are averaged in any case.
      update_every: The averages move in every step of this number of steps: in
        the n-th, the 2n-th and so on, counted from the first step of the
        averages or, if that is later, from `start_step`. Only steps that change
        weights are counted: none that only accumulates gradients, or that loss
        scaling skips. The other steps neither read nor write the averages,
        except rows of `is_lazy` averages that must catch up. A decay is one of
        an update, not of a step. So PowerDecay counts updates, and
        `num_updates` and the t of `dynamic_decay` are divided by
        `update_every`, without the remainder. The first step of the averages is
        saved and restored; `seed_averages` resets it.

    Raises:
      TypeError: If `optimizer` is not a Keras optimizer, or an argument has a
        wrong type.
      ValueError: If a number is out of range, `lazy` is neither None nor False,
        `variables` is empty, or `keep_raw_weights` is True and an optimizer
        inside ends `fit` with its own averages. In `build`, if `variables`
        selects nothing, or lists anything that the optimizer does not train.
    """
    super().__init__(optimizer, name, sum_duplicates)
    average_batch_norm = _statistics.checked(average_batch_norm)
    self._lazy = _may_be_lazy.checked_argument(lazy)
    decays = _decays.checked(average_decay)
    if any(callable(d) or tf.is_tensor(d) or isinstance(d, tf.Variable)
           for d in decays):
      raise TypeError(
          "`average_decay` must be a number, a PowerDecay, a HalfLife or a "
          f"BEMA, or a sequence of these, got {average_decay!r}.")
    self._average_decay = average_decay
    _decays.check_num_updates(num_updates)
    self._num_updates = num_updates
    self._start_step = _checks.integer("start_step", start_step, 0)
    self._update_every = _checks.integer("update_every", update_every, 1)
    self._dynamic_decay = _checks.boolean("dynamic_decay", dynamic_decay)
    self._shadow_dtype = _checked_dtype(shadow_dtype)
    self._first = _first_step.FirstStep(self._store, start_step, update_every)
    self._averages = _averaging.Averages(
        self, keep_raw_weights, variables, decays, start_step=start_step,
        update_every=update_every, steps_now=self._first.steps_now)
    if average_batch_norm:
      self._store.statistics = _statistics.Statistics(
          self, average_batch_norm, functools.partial(
              self._make_rows, suffix=_last_file.OF_BATCH_NORM))

  def _check_variables(self, variables):
    for v in self._averages.candidates(variables).values():
      allowed = {tf.as_dtype(v.dtype).name, _store.float32_for_half(v).name}
      if self._shadow_dtype and self._shadow_dtype.name not in allowed:
        raise ValueError(
            f"`shadow_dtype` must be {' or '.join(sorted(allowed))}, got "
            f"{self._shadow_dtype.name}, for '{path_of(v)}'.")

  def _make_state(self, variables):
    self._store.rows = self._make_rows(self._averages.candidates(variables))
    self._store.make_begun()
    if (self._update_every > 1 or self._start_step or self._dynamic_decay or
        _decays.need_count(self._averages.decays)):
      self._first.make()

  def _make_rows(self, variables, suffix=""):
    """Averages of variables, a row for each decay.

    Args:
      variables: {index: variable}, see `_state.State.add`.
      suffix: The end of their names.
    """
    decays = self._averages.decays
    # Files know averages by their decays.
    self._store.state.name_in_files(f"average{suffix}",
                                    f"average_{decays[0]}{suffix}")
    return [self._store.make_row(
        (f"average_{decay}" if k else "average") + suffix, variables,
        lambda v: self._shadow_dtype or _store.float32_for_half(v), self._wrap)
            for k, decay in enumerate(decays)]

  def _wrap(self, average, variable):
    value = value_of(variable)
    # Keras's own averages overwrite variables.
    if (self._lazy is False or not variable.trainable or
        self.use_ema or
        not any(map(_rules.touches_few_rows, _views.innermost(self))) or
        not _may_be_lazy.may_be_lazy(value)):
      return _variables.Average.of(average)
    return _variables.LazyAverage(average, value)

  def average(self, variable: keras.Variable,
              decay: Optional[_decay.Decay] = None) -> Any:
    """The average of a variable.

    Args:
      variable: A variable that the optimizer was built with, or a moving
        statistic of a batch normalization that it averages.
      decay: Which of several decays; by default the first.

    Returns:
      The `keras.Variable` that holds its average. If its rows may lag behind
      (`is_lazy`), or may do so later, an object that is no variable: it
      converts to a tensor, and has the methods of a variable to read and assign
      it. `lazy=False` makes all averages variables. Before the first step, an
      average is its variable: to set it there, call `seed_averages` before.

    Raises:
      RuntimeError: If the optimizer is not built, or the average is in place of
        its variable.
      ValueError: If the optimizer does not have the decay.
      KeyError: If the optimizer does not have the variable, or does not average
        it.
    """
    return self._averages.average(variable, decay)

  def is_lazy(self, variable: tf.Variable) -> bool:
    """Whether a step updates only the touched rows of a variable's averages.

    It does if the inner optimizer changes only the rows that a sparse gradient
    touches: SGD without momentum, Adagrad and `LazyAdam`, without weight decay.
    A step then costs only these rows. The averages of the other rows catch up,
    exactly, with the steps that they missed before an average is read. It does
    not if `lazy` is False, in a `tf.distribute` strategy, for a variable whose
    first gradient in a `tf.function` was dense, in and around a `Lookahead`,
    around an optimizer with `use_ema`, and if a `tf.function` of another
    optimizer changes the variable.

    Args:
      variable: A variable that the optimizer was built with.

    Returns:
      A bool.
    """
    self._require_built("is_lazy")
    return _lazy.is_lazy(
        self._averages.found(variable, self._store.rows[0]))

  def decays(self) -> list[_decay.Decay]:
    """The decays of the averages: a list of numbers, PowerDecays and BEMAs."""
    return list(self._averages.public)

  def averages_by_decay(self, model: keras.Model) -> list[Any]:
    """The averages of a model's variables, for snapshots.

    Returns:
      A list of (decay, number of steps of the averages or None, function). The
      function maps a variable to its average or None.
    """
    steps = self.average_steps() if self.built else None
    if steps is not None:  # Until the averages moved last.
      steps -= steps % self._update_every
    return self._averages.by_decay(model, steps)

  def set_model(self, model: keras.Model) -> None:
    """Sets the model, for `average_batch_norm`.

    For custom training loops: in `fit`, `EvaluateWithAverages` calls it.

    Args:
      model: The model that the optimizer trains.

    Raises:
      TypeError: If `model` is not a Keras model.
      ValueError: If the statistics of another model are averaged already, and
        `model` has more of them.
    """
    self._averages.set_model(model)

  # Steps

  def _statistics_of(self, step):
    """(variable, average) pairs of statistics: for each decay that moves."""
    statistics = self._store.statistics
    return [statistics.moved_pairs(step, k) if statistics else []
            for k in self._averages.moving]

  def _averages_of(self, step):
    decays = self._decays_now(step)
    # The forward pass has updated the statistics.
    of_batch_norm = self._statistics_of(step)
    if of_batch_norm[0]:
      _plan.update_all(of_batch_norm,
                       _decays.where_due(step.accept, decays))
    return [[value_of(row[key]) if key in row else None
             for key in step.keys]
            for row in self._averages.moving_of(self._store.rows)], decays

  def _note_update(self):
    # Not before the step, which may raise an error.
    self._store.mark_begun()

  def _follow(self, step):
    self._store.mark_begun()
    _plan.update_all(
        [step.pairs(row) + of_batch_norm for row, of_batch_norm in zip(
            self._averages.moving_of(self._store.rows),
            self._statistics_of(step))], self._decays_now(step))

  def _ahead(self):
    return (None if self._num_updates is None else
            _decays.value_now(self._num_updates))

  def _decays_now(self, step):
    """The decays of a Step, of averages which steps move."""
    every = self._update_every
    moving = self._averages.moving_of(self._averages.decays)
    # A function is called once in each step.
    n = self._ahead() if step.ahead is None else step.ahead[id(self)]
    steps, since = (self._first.steps_before(
        step, self._start_step or self._dynamic_decay)
                    if self._store.counts else (None, None))
    due = _decays.is_due(steps, every)
    if due is False and (not self._start_step or since >= 0):
      return _decays.unmoved(moving)
    counts = [since] if self._dynamic_decay else []
    if n is not None:
      counts.append(n if every == 1 else tf.convert_to_tensor(n))
    decays = _decays.of_step(moving, steps, due, counts, every)
    if self._start_step:
      decays = [tf.where(since < 0, tf.constant(0, tf.float64), ops.float64(d))
                for d in decays]
    return decays

  def average_steps(self) -> Optional[int]:
    """The number of steps of the averages: an int, or None.

    None if no decay is a `PowerDecay` or a `BEMA`, `update_every` is 1, and
    neither `start_step` nor `dynamic_decay` is set: then steps are not counted.
    After t steps, the averages have moved
    `t // update_every` times.

    Raises:
      RuntimeError: If the optimizer is not built.
    """
    self._require_built("average_steps")
    return self._first.total() if self._store.counts else None

  def get_config(self) -> dict[str, Any]:
    statistics = self._store.statistics
    return {**super().get_config(),
            "average_decay": self._average_decay,
            "num_updates": _serialized_count(self._num_updates),
            "start_step": self._start_step,
            "dynamic_decay": self._dynamic_decay,
            "shadow_dtype": self._shadow_dtype and self._shadow_dtype.name,
            "average_batch_norm": (
                statistics.config() if statistics else False),
            "lazy": self._lazy, "update_every": self._update_every}


def _checked_dtype(shadow_dtype):
  if shadow_dtype is None:
    return None
  with contextlib.suppress(TypeError):
    dtype = tf.as_dtype(shadow_dtype)
    if dtype in _types.FLOATS:
      return dtype
  raise TypeError("`shadow_dtype` must be float16, bfloat16, float32 or "
                  f"float64, got {shadow_dtype!r}.")


def _serialized_count(num_updates):
  """An argument `num_updates` in a configuration."""
  if num_updates is None or isinstance(num_updates, numbers.Real):
    return num_updates
  if isinstance(num_updates, (np.ndarray, tf.Tensor)) and (
      hasattr(num_updates, "__array__")):  # No tensor of a graph.
    return np.array(num_updates).item()
  if callable(num_updates) and keras.saving.get_registered_object(
      keras.saving.get_registered_name(num_updates)) is num_updates:
    return keras.saving.serialize_keras_object(num_updates)
  raise ValueError(
      "`num_updates` of a MovingAverage that is saved must be a number, or a "
      "function registered by keras.saving.register_keras_serializable, got "
      f"{num_updates!r}. Save the model with save_weights(), or use "
      "dynamic_decay=True.")
