"""Moving averages of the weights, updated by every optimizer step."""

from collections.abc import Iterator
import contextlib
from typing import Any, Optional

import tensorflow as tf

from wrapopt import _checks
from wrapopt import ops
from wrapopt._averages import _decay
from wrapopt._averages import _decays
from wrapopt._averages import _lazy
from wrapopt._averages import _may_be_lazy
from wrapopt._averages import _plan
from wrapopt._types import (
    GradsAndVars, Operation, Session, V1Optimizer, Variable)
from wrapopt._v1._averages import _averaging
from wrapopt._v1._averages import _slots
from wrapopt._v1._evaluation._swapping_saver import SwappingSaver
from wrapopt._v1._steps import _step
from wrapopt._v1._wrapper import WrapperOptimizer


class MovingAverageOptimizer(WrapperOptimizer):
  """Keeps exponential moving averages of the variables that it trains.

  After each step of the inner optimizer, every variable `v` that had a gradient
  updates its average (shadow) `s`

      s += (1 - decay) (v - s)

  Training continues with the variables. The averages are usually better weights
  to evaluate and to serve. `averaged_weights` puts them in place of the
  variables for a `with` block. `swapping_saver` writes them into a checkpoint
  under the variables' names.

  If there is a native op for the inner optimizer (`fused`), one op per device
  and dtype takes the step and updates the averages of all decays in one pass
  over memory. Otherwise the inner optimizer takes its step, and then one op per
  device and dtype updates all averages. Averages of variables that the step
  does not train, which a list `variables` may hold, are in this second op, too.

  Embeddings: a step with a sparse gradient costs only the rows that it touches,
  if the inner optimizer does not change the other rows (`is_lazy`). The
  averages of the other rows catch up, exactly, with the steps that they missed
  before an average is read, saved or put in place, and before any other code of
  this package changes the variable. Before your own code changes it, read its
  averages, or set `lazy=False`: rows can only catch up with a value that is
  still there.

  State: for each averaged variable `v` of name `<v>`, one variable per decay of
  the same shape, not trainable: `<v>/ExponentialMovingAverage` for the first
  decay, `<v>/ExponentialMovingAverage_<decay>` for the others. In a graph, its
  initializer takes the value of `v` if `v` is initialized, else the value that
  the initializer of `v` assigns, also that of
  `tf.compat.v1.train.init_from_checkpoint` or `warm_start`. To initialize for a
  second time (in the same session, or on a server that still has the variables
  of an earlier job), run the initializer of `v` first: in one run with it, an
  average may take the old value of `v`. In eager mode, it starts at the value
  of `v` before the first step.

  Example, eager:

  >>> w = tf.Variable([1.0])
  >>> opt = wrapopt.MovingAverageOptimizer(
  ...     tf.compat.v1.train.GradientDescentOptimizer(1.0), average_decay=0.5)
  >>> opt.minimize(lambda: w, var_list=[w])
  >>> w.numpy(), opt.average(w).numpy()
  (array([0.], dtype=float32), array([0.5], dtype=float32))
  >>> with opt.averaged_weights():
  ...   print(w.numpy())
  [0.5]

  In a graph: `train_op = opt.minimize(loss)`, and at the end
  `opt.swapping_saver().save(session, path)`.

  References: Polyak and Juditsky, "Acceleration of stochastic approximation by
  averaging", 1992; `tf.contrib.opt.MovingAverageOptimizer` of TensorFlow 1.15.

  Differences from 1.15: several decays, `shadow_dtype`, `averaged_weights`,
  `seed_averages`; the whole optimizer interface; eager mode and `tf.function`;
  `tf.train.Checkpoint`; `1 - decay` is computed in float64; any number of
  `apply_gradients` calls; the saver swaps variables, whatever their keys; one
  pass for step and averages. A decay outside of [0, 1] and a negative
  `num_updates` are errors. `opt` must be a `tf.compat.v1.train.Optimizer`. Its
  slots and checkpoints are the wrapper's.
  """

  def __init__(self, opt: V1Optimizer, average_decay: Any = 0.9999,
               num_updates: Any = None, sequential_update: bool = True,
               name: str = "MovingAverageOptimizer", *,
               shadow_dtype: Any = None, fused: Optional[bool] = None,
               lazy: Optional[bool] = None, variables: Any = None,
               update_every: int = 1) -> None:
    """Wraps `opt`.

    Args:
      opt: A `tf.compat.v1.train.Optimizer`.
      average_decay: A number in [0, 1], a `wrapopt.PowerDecay`, a
        `wrapopt.HalfLife` or a `wrapopt.BEMA`; or a sequence or an array of
        different ones, one for each average; or a scalar tensor or variable, or
        a callable that returns one. A `tf.train.Checkpoint` knows several
        averages by their decays: any order restores, and a single average
        becomes the first. A `Saver` knows them by name. The first has no decay
        in its name: keep it the first.
      num_updates: A count n of updates: a number, or a tensor, variable or
        callable that is read in each step. It limits decays to at most
        `(1 + n) / (10 + n)`, so that the averages move faster at the start of
        training. It does not limit a PowerDecay, which
        `HalfLife(fraction=...)` is, too. If it is the global step, n is 1 in
        the first step.
      sequential_update: Whether the averages are updated after the step of the
        inner optimizer, and `num_updates` is read after the increment of the
        global step. If False, the order in a graph is undefined, as in 1.15.
        Eager mode, `tf.function` and one pass for both always keep the order.
      name: The name of the optimizer.
      shadow_dtype: If `tf.float32`, averages of float16 and bfloat16 variables
        are kept in float32. By default an average has the dtype of its
        variable, as in 1.15. A float16 or bfloat16 average hardly moves at
        decays near 1, since its increments are rounded away.
      fused: Whether one pass over memory takes the inner optimizer's step and
        updates the averages. By default (None), if there is an op for it: the
        inner optimizer is exactly an `AdadeltaOptimizer`, `AdagradOptimizer`,
        `AdamOptimizer`, `FtrlOptimizer` (of `learning_rate_power` -0.5),
        `GradientDescentOptimizer`, `MomentumOptimizer` or `RMSPropOptimizer` of
        `tf.compat.v1.train`, or a `LazyAdamOptimizer`, and no subclass of it.
        True raises an error if there is none. False leaves the step to the
        inner optimizer: variables and slots then equal TensorFlow's bit for
        bit. In one pass they equal TensorFlow's to rounding. Names and
        checkpoints are the same in both cases.
      lazy: Whether the averages of rows that a sparse gradient does not touch
        may lag behind until they are read. By default (None), where that is
        exact (`is_lazy`). If False, each step moves all rows, and `average`
        always returns a `tf.Variable`.
      variables: Which variables are averaged; by default all that have a
        gradient. A function of a variable that returns True or False, or a list
        of variables. A function is called before the first step of a variable
        that has a gradient, with the strategy's variable in a `tf.distribute`
        strategy. A list may also hold variables that no step trains, such as
        the statistics of batch normalizations: their averages move after every
        step. Put their own updates before it:

            with tf.control_dependencies(update_ops):
              train_op = opt.minimize(loss)

        Every `apply_gradients` must get the same variables of the list. The
        variables that are not chosen are trained in the same way, and an
        evaluation uses them as they are. They have no average, at no cost.
      update_every: The averages move in every step of this number of steps: in
        the n-th, the 2n-th and so on, counted from the first step of the
        averages. Only steps that change averaged variables are counted:
        none that a gate drops. The other steps neither read nor write the
        averages, except rows of `is_lazy` averages that must catch up. A decay
        is one of an update, not of a step: the update after n steps multiplies
        the average by it once. `num_updates` is divided by `update_every`,
        without the remainder. The count, "average_steps", is saved and
        restored; `seed_averages` resets it.

    Raises:
      TypeError: If `opt` is not a `tf.compat.v1.train.Optimizer`, or
        `average_decay`, `num_updates`, `sequential_update`, `fused`,
        `variables` or `update_every` has another type.
      ValueError: If a decay or `num_updates` is out of range, decays repeat,
        `fused` is True and there is no op for the inner optimizer,
        `shadow_dtype` is another dtype, `lazy` is neither None nor False,
        `variables` is an empty list, `update_every` is less than 1, or `opt`
        contains a `MovingAverageOptimizer` or a `SyncReplicasOptimizer`.
    """
    decays = _decays.checked(average_decay)
    _decays.check_num_updates(num_updates)
    if not (shadow_dtype is None or _is_float32(shadow_dtype)):
      raise ValueError(
          "`shadow_dtype` must be None (the dtype of each variable) or "
          f"tf.float32, got {shadow_dtype!r}.")
    super().__init__(opt, name)
    self._averages = _averaging.Averages(
        self, decays=decays,
        shadow_dtype=None if shadow_dtype is None else tf.float32,
        lazy=_may_be_lazy.checked_argument(lazy), variables=variables,
        update_every=update_every)
    self._fused = _checks.fused(fused)
    if fused and not self.fused:
      raise ValueError(
          f"`fused` must not be True: {type(opt).__qualname__} with these "
          "arguments has no op that takes its step and updates the averages in "
          "one pass. Leave `fused` at None.")
    self._num_updates = num_updates
    self._sequential_update = _checks.boolean_or_01("sequential_update",
                                                    sequential_update)

  # Training

  @ops.not_converted
  def apply_gradients(self, grads_and_vars: GradsAndVars,
                      global_step: Optional[Variable] = None,
                      name: Optional[str] = None,
                      **kwargs: Any) -> Optional[Operation]:
    """Takes the inner optimizer's step and updates the averages.

    Args:
      grads_and_vars: An iterable of (gradient, variable). A variable with a
        None gradient is not trained. It is averaged only if a list `variables`
        holds it.
      global_step: A variable to increment by one, or None.
      name: A name for the inner optimizer's operation.
      **kwargs: Further arguments of the inner optimizer.

    Returns:
      In a graph, an `Operation` named `train_with_avg`. In eager mode, None.

    Raises:
      TypeError: If an averaged variable is not of a floating dtype, a gradient
        cannot be converted to a tensor, or a function `variables` returns
        anything but True or False.
      ValueError: If there is no variable, none has a gradient, none is in the
        list `variables`, one of the list is of another graph, or an earlier
        call got other variables of the list.
      NotImplementedError: If each replica of a `tf.distribute` strategy has its
        own value of a variable of the list.
      RuntimeError: In eager mode, inside `averaged_weights`.
    """
    return _step.apply_gradients(self._take, grads_and_vars, global_step, name,
                                 kwargs)

  def _take(self, step):
    kept = self._averages
    variables = kept.trained(step, bool(self._sequential_update))
    stored, shadows = kept.by_decay(variables)
    untrained = kept.untrained_by_decay(variables)
    averages = _plan.StepAverages(
        variables, shadows, stored,
        _decays.Schedule(kept.moving_of(kept.decays), self._num_updates,
                         self.average_steps(), kept.update_every),
        self._sequential_update, untrained)
    if not (averages.has_trained or untrained[0]):
      averages = None
    taken = self._inner._take(
        step.with_fused(self._fused)._replace(averages=averages))
    return taken._replace(done=_step.group(taken.done, name="train_with_avg"))

  @property
  def fused(self) -> bool:
    """Whether one pass over memory takes the step and updates the averages.

    Even if True, the inner optimizer takes the step, and the averages are
    updated after it, if a variable has a constraint or is listed twice, in a
    `tf.distribute` strategy, and if a decay or `num_updates` is a callable,
    which must be called after the step.
    """
    return self._fuses()

  def _fuses(self):
    return self._fused is not False and super()._fuses()

  def is_lazy(self, var: Variable) -> bool:
    """Whether a step updates only the touched rows of a variable's averages.

    It does if the inner optimizer changes only the rows that a sparse gradient
    touches: all optimizers of `fused` but Adam. A step then costs only these
    rows. The averages of the other rows catch up, exactly, with the steps that
    they missed before an average is read. It does not if `lazy` or
    `sequential_update` is False, for ref variables (a step of a sparse gradient
    warns, once in a process), in a `tf.distribute` strategy, for a variable
    whose first gradient in a graph was dense or that `build` got there, around
    and in an optimizer that averages over workers, and if a graph or
    `tf.function` of another optimizer changes the variable.

    Args:
      var: A variable.

    Returns:
      A bool.
    """
    return any(map(_lazy.is_lazy, self._averages.of_variable(var)))

  # The averages

  def average(self, var: Any, decay: Optional[_decay.Decay] = None) -> Any:
    """The average of a variable.

    Args:
      var: A variable. For a `PartitionedVariable`, the result is a list.
      decay: Which of several decays; by default the first.

    Returns:
      The variable that holds the average, or None if `var` is not averaged
      (`variables`), or has had no gradient yet and was not given to `build`. If
      its rows may lag behind
      (`is_lazy`), and in eager mode if they may do so later, an object that is
      no `tf.Variable`: it converts to a tensor, and has the methods of a
      variable to read, assign and save it, but no `handle`. `lazy=False` makes
      all averages variables.

    Raises:
      RuntimeError: In eager mode, if the average is in place of its variable.
    """
    k = self._averages.index_of(decay)
    if not isinstance(var, tf.Variable):
      return [self.average(v, decay) for v in var]
    return self._averages.average(var, k)

  @property
  def _ema(self):
    """For programs of TensorFlow 1.x: an object like its `_ema`.

    1.x had no public way to an average. The object has `average(var)` and
    `average_name(var)`, as this optimizer, and `_decay`. Of several decays, it
    knows the first. New code calls `average` and `average_name`.
    """
    return _Ema(self)

  def average_steps(self) -> Optional[Variable]:
    """The variable that counts the steps of the averages.

    After t steps, the averages have moved `t // update_every` times.

    Returns:
      An int64 variable, "average_steps" in graphs and checkpoints. None if
      there is no average yet, or if no decay is a `PowerDecay` or a `BEMA` and
      `update_every` is 1: then steps are not counted.
    """
    return self._averages.steps_of(_slots.graph_of_state())

  def average_name(self, var: Variable,
                   decay: Optional[_decay.Decay] = None) -> str:
    """The name of a variable's average, in graphs and checkpoints.

    Args:
      var: A variable.
      decay: Which of several decays; by default the first.

    Returns:
      A string, such as "w/ExponentialMovingAverage".
    """
    k = self._averages.index_of(decay)
    average = self._averages.stored(var, k)
    if average is not None:
      return average.name.split(":")[0]
    return var.name.split(":")[0] + "/" + self._averages.names[k]

  def seed_averages(self, session: Optional[Session] = None) -> None:
    """Sets every average, of every decay, to its variable's current value.

    For a run that resumes from a checkpoint without averages. Restore the
    variables, then seed the averages:

        saver = tf.compat.v1.train.Saver(
            [v for v in tf.compat.v1.global_variables()
             if v not in opt.averages() and v is not opt.average_steps()])
        saver.restore(session, path)
        opt.seed_averages(session)

    With `tf.train.Checkpoint`, restore and then call `opt.seed_averages()`.

    Args:
      session: In a graph, the session; by default the default session. The
        graph may be finalized.

    Raises:
      RuntimeError: If there is no average yet, or the averages are in place.
    """
    self._averages.seed(session, 0)

  def averages(self) -> list[Any]:
    """All averages in this graph: a list of what `average` returns.

    Of a BEMA, the variables from which it follows.

    In eager mode and in a `tf.function`, the averages of eager mode.

    Raises:
      RuntimeError: In eager mode, inside `averaged_weights`.
    """
    return _averaging.readable(self._averages.all(_slots.graph_of_state()),
                               "averages")

  def averages_by_decay(self, graph: Any) -> list[Any]:
    """Returns [(decay, [(variable, average)])] of a graph (None: eager mode).

    Raises:
      RuntimeError: If there is no average yet, or in eager mode, inside
        `averaged_weights`.
    """
    return self._averages.readable_by_decay(graph)

  @contextlib.contextmanager
  def averaged_weights(self, session: Optional[Session] = None,
                       decay: Optional[_decay.Decay] = None) -> Iterator[None]:
    """Puts the averages in place of the weights for a `with` block.

    Inside the block, every averaged variable holds its average, and the average
    has no value: `average` and reads of what it gave before raise an error.
    If a `tf.Variable` was taken before, or a `tf.function` traced before, or if
    a session reads it, TensorFlow's own op fails with its words, such as
    "Trying to read variable with wrong dtype. Expected float got INVALID".
    Leave the block first, or read the variable. After the block, also after an
    exception, both have their own values again, bit for bit. Buffers are
    exchanged: nothing is copied. Only if an average has another dtype than its
    variable, it is converted and copied into the variable.

    If several threads enter such blocks of one session, or of eager mode, at
    once, one enters and the others get the RuntimeError.

    A step inside the block would start at the averages, and the averages would
    then contain it. So it raises an error and changes nothing: in eager mode
    and if a `tf.function` is traced in the block, a RuntimeError; in a session
    and in a `tf.function` that was traced or compiled before, a
    `tf.errors.FailedPreconditionError`. If anything else has changed an
    averaged variable in the block, such as a step of another optimizer, this is
    an error at its end in eager mode, and variables and averages get their
    values from before the block. A session does not see it: the average is then
    changed.

    Args:
      session: In a graph, the session; by default the default session. In a
        `MonitoredSession`, the exchange runs no hooks, and the session is
        recreated as in `run`. The graph may be finalized.
      decay: Which of several decays; by default the first.

    Yields:
      None.

    Raises:
      RuntimeError: If there is no average yet, or the averages are in place
        already. After the block, if an average was assigned or restored in it,
        or in eager mode a variable.
    """
    with self._averages.in_place(session, self._averages.index_of(decay)):
      yield

  # Checkpoints

  def swapping_saver(self, var_list: Any = None, name: str = "swapping_saver",
                     *, decay: Optional[_decay.Decay] = None,
                     **kwargs: Any) -> SwappingSaver:
    """A Saver that writes averages under the names of their variables.

    In its files, `v` holds the average of `v` and `v/ExponentialMovingAverage`
    the raw value. A plain `tf.compat.v1.train.Saver` restores the averaged
    model from such a file. This saver restores the state that was saved.

    The `.meta` file beside it holds the whole graph, as with every Saver, and
    so the native ops of the step. A program that imports it must `import
    wrapopt` before. The migration guide shows how to write one that needs no
    wrapopt.

    If an average has another dtype than its variable, `v` holds the average in
    the dtype of `v`, and `v/ExponentialMovingAverage/full_precision` holds it
    in its own dtype.

    Args:
      var_list: The variables to save: None for all current global variables, an
        iterable of variables, or a dict from names to variables. A variable is
        swapped with its average, whatever the names. Variables without an
        average are saved unchanged.
      name: A name for the saver's operations.
      decay: Which of several decays; by default the first. The averages of the
        other decays are saved unchanged.
      **kwargs: Arguments of `tf.compat.v1.train.Saver`.

    Returns:
      A `tf.compat.v1.train.Saver`. Inside `averaged_weights`, its `save` and
      `restore` raise a RuntimeError. Its `restore` raises a ValueError if the
      file has averages of the first decay under the name of another one.

    Raises:
      RuntimeError: If there is no average yet.
      ValueError: If a variable is to be saved without its average, or an
        average without its variable.
    """
    return self._averages.swapping_saver(
        self._averages.index_of(decay), var_list, name, kwargs)


class _Ema:
  """What programs of TensorFlow 1.x use of `MovingAverageOptimizer._ema`.

  Attributes:
    average: The method of the optimizer.
    average_name: The method of the optimizer.
  """

  def __init__(self, opt):
    self.average, self.average_name = opt.average, opt.average_name
    self._decay = opt._averages.decays[0]


def _is_float32(dtype):
  try:
    return tf.as_dtype(dtype) == tf.float32
  except TypeError:
    return False

