"""The base class of the optimizers that train between z and its average x."""

from collections.abc import Sequence
import contextlib
from typing import Any

import keras
import tensorflow as tf

from wrapopt import ops
from wrapopt._averages import _interpolated
from wrapopt._averages import _plan
from wrapopt._averages import _replicas
from wrapopt._averages import _two_passes
from wrapopt.keras import _average
from wrapopt.keras import _averaging
from wrapopt.keras import _rules
from wrapopt.keras import _state
from wrapopt.keras import _steps
from wrapopt.keras._variables import path_of, value_of


class InterpolatingOptimizer(_averaging.AveragingOptimizer):
  """Trains z by gradients at y, between z and its average x.

  The variables hold y, one more variable for each holds z, and x follows. The
  share, a number for all variables or for each, tells whether they hold y or x.
  """

  def __init__(self, optimizer, name, keep_raw_weights, schedule):
    """Wraps an optimizer.

    Args:
      optimizer: The inner optimizer.
      name: The name of this one.
      keep_raw_weights: Whether `fit` ends with y in the model.
      schedule: A schedule of _averages/_interpolated.py.
    """
    super().__init__(optimizer, name, keep_raw_weights, sum_duplicates=True)
    self._schedule = schedule
    self._check_innermost()

  @property
  def fused(self) -> bool:
    """Whether one native op takes the step: a bool.

    Even if True, the inner optimizer takes the step in a
    CentralStorageStrategy or a TPUStrategy.
    """
    return all(_rules.may_be_interpolated(opt)
               for opt in _steps.innermost(self))

  def _check_innermost(self):
    """Raises an error for an innermost optimizer that must not be inside."""
    outer = type(self).__name__
    for opt in _steps.innermost(self):
      name = type(opt).__qualname__
      if opt.use_ema:
        raise ValueError(
            f"`optimizer` of a {outer} must not be or hold an optimizer that "
            f"keeps averages itself, got {name} with use_ema=True. Remove "
            "use_ema.")
      if type(opt).__name__.startswith("ScheduleFree"):
        raise ValueError(
            f"`optimizer` of a {outer} must be a plain optimizer, got {name}, "
            "which is Schedule-Free already. Use keras.optimizers.AdamW"
            + (" with beta_1=0." if self._schedule.replaces_momentum else "."))

  def build(self, variables: Sequence[keras.Variable]) -> None:
    if self.built:
      return
    with contextlib.ExitStack() as stack:
      for opt in _steps.innermost(self):
        if (not opt.built and self._takes_over(type(opt)) and self.fused and
            _replicas.will_have_copies()):
          stack.enter_context(_without_first_moments(opt))
      super().build(variables)

  def _takes_over(self, cls):
    """Whether the first moment of optimizers of a class is taken over."""
    return self._schedule.replaces_momentum and cls in (
        keras.optimizers.Adam, keras.optimizers.AdamW)

  def _check_variables(self, variables):
    for v in variables:
      if v.constraint is not None:
        raise ValueError(
            f"A variable that a {type(self).__name__} trains must have no "
            "constraint, since the averaged weights would not satisfy it, got "
            f"'{path_of(v)}' with {v.constraint!r}.")

  def _make_state(self, variables):
    self._check_innermost()  # A MultiOptimizer has made its optimizers now.
    trained = [v for v in variables
               if not self._overwrite_variable_with_gradient(v)]
    self._z = _state.Row({
        self._var_key(v): self._make_average(v, "z") for v in trained})
    self._schedule_states = self._make_counts(
        "schedule", self._schedule.initial_state(), dtype="float64",
        swapped_in=_interpolated.holding_x)
    self._shares = _state.Row({
        self._var_key(v): self._make_share(v) for v in trained})
    self._begun = self._make_begun()
    self._rows = [_state.Row({
        key: _interpolated.Interpolated(value_of(v), value_of(self._z[key]),
                                         value_of(self._schedule_states[part]),
                                         value_of(self._shares[key]))
        for part, opt in self._parts().items()
        for v in opt._trainable_variables
        if (key := self._var_key(v)) in self._z})]

  def _make_share(self, variable):
    """Makes the variable that holds the share of a variable."""
    with self._distribution_strategy.extended.colocate_vars_with(
        value_of(variable)):
      share = _average.Average.of(self.add_variable(
          shape=(), dtype="float64", initializer=lambda shape, dtype: (
              ops.float64(self._schedule.momentum)),
          name=f"{path_of(variable).replace('/', '_')}_share"))
    share.starts_at = self._schedule.momentum
    self._state.add("share", share, variable)
    return share

  def average(self, variable: keras.Variable) -> tf.Tensor:
    """The averaged weights x of a variable, now: a tensor.

    Args:
      variable: A variable that the optimizer was built with.

    Returns:
      A tensor of the shape and dtype of the variable. No variable holds x.

    Raises:
      RuntimeError: If the optimizer is not built, or x is in place of the
        weights.
      KeyError: If the optimizer does not have the variable.
    """
    return tf.convert_to_tensor(super().average(variable))

  def z(self, variable: keras.Variable) -> keras.Variable:
    """The variable that holds z, which the inner optimizer trains.

    Args:
      variable: A variable that the optimizer was built with.

    Returns:
      A `keras.Variable` of its shape and dtype.

    Raises:
      RuntimeError: If the optimizer is not built, or x is in place of the
        weights.
      KeyError: If the optimizer does not have the variable.
    """
    self._require_built("z")
    self._seed_unbegun()
    return self._readable("z", self._found(variable, self._z))

  # At the end of `fit`, x is in all variables, also in frozen ones.

  def assign_averages(self, model: keras.Model, decay: None) -> None:
    self._index_of(decay)
    self._hold_x()

  def _finalized(self, var_list):
    return ()

  def _warn_of_raw(self, var_list):
    pass  # None keeps y.

  def finalize_variable_values(self, var_list: Any) -> None:
    super().finalize_variable_values(var_list)
    if self.built and not self.keeps_raw_weights:
      self._hold_x()

  def _hold_x(self):
    _state.assign_all(self._averaged(None))
    for state in self._schedule_states.values():
      _state.assign(state, _interpolated.holding_x(state.numpy()))

  # Steps

  def _take(self, step, inner, grads, variables, learning_rate):
    state = value_of(self._schedule_states[step.part])
    share = _replicas.merged(lambda: self._settle(step, state))()
    motion = self._schedule.motion(state.read_value(), learning_rate, share)
    z = [value_of(self._z[key]) for key in step.keys]
    rule = (_rules.interpolated_rule_of(inner.opt, inner.cls, self._schedule)
            if _replicas.have_copies() else None)
    if rule is not None:
      _rules.apply_interpolated(inner.opt, rule, step, grads, z, motion,
                                self._schedule)
      _replicas.merged(lambda: self._note_step(state, motion))()
    else:
      self._take_around(step, inner, grads, variables, z, motion)
    return True

  def _settle(self, step, state):
    """`_interpolated.settle`, in all replicas."""
    def trained():
      return [_interpolated.Trained(*parts)
              for v, key in zip(step.variables, step.keys) for parts in zip(
                  *map(_replicas.values, (v, value_of(self._z[key]),
                                          value_of(self._shares[key]))))]

    def others():
      here = set(step.keys)
      return [x for _, key in step.trained
              if key in self._shares and key not in here
              for x in _replicas.values(value_of(self._shares[key]))]

    return _interpolated.settle(
        _replicas.values(state)[0].read_value(), self._schedule.momentum,
        trained, others, is_all=True)

  def _note_step(self, state, motion):
    state.assign(motion.state)
    self._mark_begun()

  def _take_around(self, step, inner, grads, variables, z, motion):
    """As the inner optimizer takes it, while the variables hold its z."""
    state = value_of(self._schedule_states[step.part])
    grads = list(map(tf.convert_to_tensor, grads))
    _plan.Plan(grads, step.variables)
    decays = [self._schedule.weight_decay_at_y
              if inner.opt._use_weight_decay(v) else 0.0
              for v in step.variables]
    replicas = _two_passes.replicas_of(step.variables, z, state,
                                       self._schedule, decays)

    def begin():
      for replica in replicas:  # So that a failure changes nothing.
        replica.read()
      for replica in replicas:
        replica.begin(motion)

    def end():
      for replica in replicas:
        replica.end()
      self._mark_begun()

    _replicas.merged(begin)()
    rate = tf.cast(motion.rate, keras.backend.floatx())
    seen = _steps.view(inner.opt, {
        # Keras's weight decay takes a part of it.
        "learning_rate": property(lambda _: rate),
        **({"beta_1": property(lambda _: 0.0)}
           if self._takes_over(inner.cls) else {})})
    try:
      inner.cls._apply_weight_decay(seen, variables)
      inner.cls._backend_update_step(seen, grads, variables, rate)
    except BaseException:
      if tf.executing_eagerly():
        for replica in replicas:
          replica.undo()
      raise
    _replicas.merged(end)()

  def get_config(self) -> dict[str, Any]:
    config = super().get_config()
    del config["sum_duplicates"]  # No argument.
    return {**config, **self._schedule._asdict()}


@contextlib.contextmanager
def _without_first_moments(opt):
  """Lets an Adam be built without the moments that no step uses."""
  def add(variables, names, *args, **kwargs):
    if isinstance(names, str):
      return opt.__class__.add_optimizer_variables(opt, variables, names, *args,
                                                   **kwargs)
    return [[] if name == "momentum" else add(variables, name, *args, **kwargs)
            for name in names]

  # Not by setattr, of which Keras keeps track.
  vars(opt)["add_optimizer_variables"] = add
  try:
    yield
  finally:
    del vars(opt)["add_optimizer_variables"]

