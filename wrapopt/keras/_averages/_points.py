"""Averages of optimizers that train between z and its average x."""

import contextlib

import keras
import tensorflow as tf

from wrapopt._averages import _companions
from wrapopt._averages import _interpolation
from wrapopt._averages import _plan
from wrapopt._averages import _replicas
from wrapopt._averages import _two_passes
from wrapopt.keras._averages import _assignments
from wrapopt.keras._averages import _averaging
from wrapopt.keras._averages import _public_methods
from wrapopt.keras._steps import _rules
from wrapopt.keras._steps import _views
from wrapopt.keras._variables import path_of, value_of


class Points(_averaging.Averages):
  """The points z and x of an optimizer that trains z by gradients at y.

  The variables hold y, one more variable for each holds z, and x follows. The
  share, a number for all variables or for each, tells whether they hold y or x.

  Attributes:
    schedule: The schedule.
    z: {key of a variable: the variable that holds z}.
  """

  def __init__(self, optimizer, keep_raw_weights, schedule):
    """Makes no variable yet.

    Args:
      optimizer: The wrapper.
      keep_raw_weights: Whether `fit` ends with y in the model.
      schedule: A schedule of _averages/_interpolation.py.
    """
    super().__init__(optimizer, keep_raw_weights)
    self.schedule, self.z, self._shares = schedule, {}, {}
    self._check_innermost()

  def _check_innermost(self):
    """Raises an error for an innermost optimizer that must not be inside."""
    outer = type(self._optimizer).__name__
    for opt in _views.innermost(self._optimizer):
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
            + (" with beta_1=0." if self.schedule.replaces_momentum else "."))
      self._optimizer._check_innermost(opt, self)

  def takes_over(self, cls):
    """Whether the first moment of optimizers of a class is taken over."""
    return self.schedule.replaces_momentum and cls in (
        keras.optimizers.Adam, keras.optimizers.AdamW)

  @contextlib.contextmanager
  def building(self):
    """The context in which the inner optimizer is built."""
    with contextlib.ExitStack() as stack:
      for opt in _views.innermost(self._optimizer):
        if (not opt.built and self.takes_over(type(opt)) and
            self._optimizer.fused and _replicas.will_have_copies()):
          stack.enter_context(_without_first_moments(opt))
      yield

  def check_variables(self, variables):
    for v in variables:
      if v.constraint is not None:
        raise ValueError(
            f"A variable that a {type(self._optimizer).__name__} trains must "
            "have no constraint, since the averaged weights would not satisfy "
            f"it, got '{path_of(v)}' with {v.constraint!r}.")

  def make(self, variables):
    """Makes the variables, in the store."""
    self._check_innermost()  # A MultiOptimizer has made its optimizers now.
    trained = dict(enumerate(self._optimizer._averageable(variables)))
    self.z = self._store.make_row("z", trained)
    for v in trained.values():
      _companions.note(value_of(v), value_of(self.z[self._key(v)]))
    self._store.make_counts(
        "schedule", self.schedule.initial_state(), dtype="float64",
        swapped_in=_interpolation.holding_x)
    self._shares = self._store.make_row(
        "share", trained, lambda v: tf.float64, start=self.schedule.momentum)
    self._store.make_begun()
    self._store.rows = [{
        key: _interpolation.Interpolated(*map(value_of, (
            v, self.z[key], self._store.counts[self._store.part_of[key]],
            self._shares[key])))
        for v in trained.values()
        if (key := self._key(v)) in self._store.part_of}]

  def config(self, config):
    config = super().config(config)
    del config["sum_duplicates"], config["variables"]  # No arguments.
    return {**config, **self.schedule._asdict()}

  # At the end of `fit`, x is in all variables, also in frozen ones.

  def assign(self, model, decay):
    self.index_of(decay)
    self._hold_x()

  def end(self, var_list):
    if not self._optimizer.keeps_raw_weights:
      self._hold_x()

  def _hold_x(self):
    _assignments.assign_all(self.of_model(None))
    for state in self._store.counts.values():
      _assignments.assign(state, _interpolation.holding_x(state.numpy()))

  # Steps

  def take(self, step, inner, grads, variables, learning_rate):
    """Takes a step: see `WrapperOptimizer._take`."""
    state = value_of(self._store.counts[step.part])
    share = _replicas.merged(lambda: self._settle(step, state))()
    motion = self.schedule.motion(state.read_value(), learning_rate, share)
    z = [value_of(self.z[key]) for key in step.keys]
    rule = (_rules.interpolated_rule_of(inner.opt, inner.cls, self.schedule)
            if _replicas.have_copies() else None)
    if rule is not None:
      _rules.apply_interpolated(inner.opt, rule, step, grads, z, motion,
                                self.schedule)
      _replicas.merged(lambda: self._note_step(state, motion))()
    else:
      self._take_around(step, inner, grads, variables, z, motion)
    return True

  def _settle(self, step, state):
    """`_interpolation.settle`, in all replicas."""
    def trained():
      return [_interpolation.Trained(*parts)
              for v, key in zip(step.variables, step.keys) for parts in zip(
                  *map(_replicas.values, (v, value_of(self.z[key]),
                                          value_of(self._shares[key]))))]

    def others():
      here = set(step.keys)
      return [x for _, key in step.trained
              if key in self._shares and key not in here
              for x in _replicas.values(value_of(self._shares[key]))]

    return _interpolation.settle(
        _replicas.values(state)[0].read_value(), self.schedule.momentum,
        trained, others, is_all=True)

  def _note_step(self, state, motion):
    state.assign(motion.state)
    self._store.mark_begun()

  def _take_around(self, step, inner, grads, variables, z, motion):
    """As the inner optimizer takes it, while the variables hold its z."""
    state = value_of(self._store.counts[step.part])
    grads = list(map(tf.convert_to_tensor, grads))
    _plan.Plan(grads, step.variables)
    decays = [self.schedule.weight_decay_at_y
              if inner.opt._use_weight_decay(v) else 0.0
              for v in step.variables]
    replicas = _two_passes.replicas_of(step.variables, z, state,
                                       self.schedule, decays)

    def begin():
      for replica in replicas:  # So that a failure changes nothing.
        replica.read()
      for replica in replicas:
        replica.begin(motion)

    def end():
      for replica in replicas:
        replica.end()
      self._store.mark_begun()

    _replicas.merged(begin)()
    rate = tf.cast(motion.rate, keras.backend.floatx())
    seen = _views.view(inner.opt, {
        # Keras's weight decay takes a part of it.
        "learning_rate": property(lambda _: rate),
        **({"beta_1": property(lambda _: 0.0)}
           if self.takes_over(inner.cls) else {})})
    try:
      inner.cls._apply_weight_decay(seen, variables)
      inner.cls._backend_update_step(seen, grads, variables, rate)
    except BaseException:
      if tf.executing_eagerly():
        for replica in replicas:
          replica.undo()
      raise
    _replicas.merged(end)()


class Methods(_public_methods.PublicMethods):
  """The methods of a wrapper whose `_averages` are Points."""

  _fuses = staticmethod(_rules.may_be_interpolated)

  def _building(self):
    return self._averages.building()

  def _make_state(self, variables):
    self._averages.make(variables)

  def _take(self, *args):
    return self._averages.take(*args)

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
    return tf.convert_to_tensor(self._averages.average(variable))

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
    self._store.seed_unbegun()
    return self._averages.readable(
        "z", self._averages.found(variable, self._averages.z))


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
