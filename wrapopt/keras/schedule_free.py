"""Schedule-Free learning: an average of the weights instead of a schedule."""

from collections.abc import Sequence
import contextlib
from typing import Any, Optional, Union

import keras
import tensorflow as tf

from wrapopt._averages import _plan
from wrapopt._averages import _replicas
from wrapopt._averages import _schedule_free
from wrapopt._averages import _two_passes
from wrapopt.keras import _averaging
from wrapopt.keras import _rules
from wrapopt.keras import _state
from wrapopt.keras import _steps

_value = _rules.value

# Attributes of Keras's optimizers that give them a momentum.
_MOMENTA = ("momentum", "beta_1", "adam_beta_1")


@keras.saving.register_keras_serializable("wrapopt")
class ScheduleFree(_averaging.AveragingOptimizer):
  """Trains with a constant learning rate and evaluates an average.

  The inner optimizer trains `z`, by gradients at `y`, and `x` is the average of
  all `z`. In step t, counted from 1,

      y = (1 - momentum) z + momentum x
      z = the inner optimizer's step from z, by the gradient at y
      x = (1 - c) x + c z

      c = w_t / (w_1 + ... + w_t)
      w_t = t^r (the largest learning rate until t)^weight_lr_power

  The variables of the model hold y in the training, and one more variable for
  each holds z. x is the average: it follows from the two, needs no memory, and
  is what one evaluates and ships. As with the other wrappers, `average`,
  `averaged_weights` and `averaged_model` give it, `EvaluateWithAverages`
  evaluates it, and `fit` ends with it in the model. A later `fit` continues the
  training from it: its first gradient is that at x. All three points start at
  the value of the variable before the first step.

  No schedule of the learning rate is needed, and the number of steps is not
  known beforehand. The rate is larger than with a schedule: for SGD 10 to 50
  times, for Adam 1 to 10 times that of the plain optimizer. It must not decay.

  If the inner optimizer is exactly one of Keras's SGD, Adam, AdamW, Adagrad and
  RMSprop (not centered, without AMSGrad), one native op takes the step and the
  averaging in one pass over memory (`fused`). Around SGD that takes the memory
  of SGD with momentum, around Adam that of Adam, since Schedule-Free learning
  replaces the momentum. Around any other optimizer, and in a
  CentralStorageStrategy or a TPUStrategy, the inner optimizer takes its own
  step from z.

  The inner optimizer must have no momentum, which would act twice. That of Adam
  and AdamW is taken over: their `beta_1` must be `momentum` or 0, and they keep
  no first moments. From then on, the optimizer is part of this one: do not use
  it alone.

  The weight decay of the inner optimizer shrinks z. `weight_decay_at_y` takes
  its part from y, as the authors' own AdamWScheduleFree does.

  The step with the sparse gradient of an embedding is that of the dense one: y
  moves in all rows towards z, in each step, so no row can wait. Gradients of
  one row are summed first.

  Example:

  >>> w = keras.Variable([0.0])
  >>> opt = wrapopt.keras.ScheduleFree(keras.optimizers.SGD(1.0), 0.5)
  >>> for _ in range(2):
  ...   opt.apply([tf.constant([-1.0])], [w])
  >>> opt.z(w).numpy(), opt.average(w).numpy()  # x: the mean of 1 and 2.
  (array([2.], dtype=float32), array([1.5], dtype=float32))
  >>> w.numpy()
  array([1.75], dtype=float32)

  In a model: `model.compile(wrapopt.keras.ScheduleFree("adam"), ...)`.

  After you have set the weights yourself in the middle of a training, call
  `seed_averages`: z and x do not follow them.

  Half-precision variables: x follows from y with the precision of y. Use
  float32 variables, such as those of Keras's policy mixed_bfloat16.

  References: Defazio, Yang, Mehta, Mishchenko, Khaled and Cutkosky, "The road
  less scheduled", NeurIPS 2024, arXiv 2405.15682; the authors' package
  `schedulefree` for PyTorch, whose ScheduleFreeWrapper has the same numbers.

  Differences from `schedulefree`: `averaged_weights` and the end of `fit`
  replace the modes `train()` and `eval()`; Adam is Keras's, whose epsilon is
  not divided by the bias correction; a step with a learning rate of 0 at the
  start changes nothing.

  Differences from `keras.optimizers.ScheduleFreeAdamW`: x can be evaluated and
  saved; the warm-up counts in the weights of the average; weight decay acts on
  z; x is not computed from a z of after the step, as by Keras 3.15.
  """

  def __init__(
      self, optimizer: Union[str, dict[str, Any], keras.optimizers.Optimizer],
      momentum: float = 0.9, warmup_steps: int = 0,
      weight_lr_power: float = 2.0, r: float = 0.0, name: Optional[str] = None,
      *, weight_decay_at_y: float = 0.0,
      keep_raw_weights: bool = False) -> None:
    """Wraps `optimizer`.

    Args:
      optimizer: A Keras optimizer, or its name or configuration.
      momentum: The weight of x in the point y at which gradients are taken: a
        number greater than 0 and at most 1. Long runs gain from 0.95 or 0.98.
      warmup_steps: The number of steps in which the learning rate rises
        linearly to its value: an int. The authors advise a warm-up for Adam.
      weight_lr_power: The power of the largest learning rate so far in the
        weight of a step: a number of at least 0.
      r: The power of the number of a step in its weight: a number of at least
        0. 0 is the mean of all z, larger ones favour the latest.
      name: The name of the optimizer.
      weight_decay_at_y: The part of y, times the learning rate, that each step
        takes from z: a number of at least 0. Variables that are excluded from
        the inner optimizer's weight decay are excluded here.
      keep_raw_weights: Whether `fit` ends with y in the model. By default, it
        ends with x.

    Raises:
      TypeError: If `optimizer` is not a Keras optimizer, or an argument has a
        wrong type.
      ValueError: If a number is out of range, `optimizer` has a momentum, keeps
        averages itself, or is or holds another wrapper that keeps averages.
    """
    super().__init__(optimizer, name, keep_raw_weights, sum_duplicates=True)
    self._schedule = _schedule_free.checked(
        momentum, warmup_steps, weight_lr_power, r, weight_decay_at_y)
    self._check_innermost()

  @property
  def fused(self) -> bool:
    """Whether one native op takes the step: a bool.

    Even if True, the inner optimizer takes the step in a
    CentralStorageStrategy or a TPUStrategy.
    """
    return all(_rules.may_be_schedule_free(opt)
               for opt in _steps.innermost(self))

  def _check_innermost(self):
    for opt in _steps.innermost(self):
      if opt.use_ema:
        raise ValueError(
            "`optimizer` of a ScheduleFree must not be or hold an optimizer "
            f"that keeps averages itself, got {type(opt).__qualname__} with "
            "use_ema=True. Remove use_ema.")
      name = type(opt).__qualname__
      if type(opt).__name__.startswith("ScheduleFree"):
        raise ValueError(
            "`optimizer` of a ScheduleFree must be a plain optimizer, got "
            f"{name}, which is Schedule-Free already. Use "
            "keras.optimizers.AdamW with beta_1=0.")
      for momentum in _MOMENTA:
        value, ours = getattr(opt, momentum, None), self._schedule.momentum
        takes_over = _takes_over(type(opt))
        if value and not (takes_over and value == ours):
          raise ValueError(
              "`optimizer` of a ScheduleFree must have no momentum, which "
              f"would act twice, got {name} with {momentum}={value} and a "
              f"ScheduleFree with momentum={ours}. Pass {momentum}="
              f"{f'{ours} or ' if takes_over else ''}0 to {name}.")

  def build(self, variables: Sequence[keras.Variable]) -> None:
    if self.built:
      return
    with contextlib.ExitStack() as stack:
      for opt in _steps.innermost(self):
        if (not opt.built and _takes_over(type(opt)) and self.fused and
            _replicas.will_have_copies()):
          stack.enter_context(_without_first_moments(opt))
      super().build(variables)

  def _check_variables(self, variables):
    for v in variables:
      if v.constraint is not None:
        raise ValueError(
            "A variable that a ScheduleFree trains must have no constraint, "
            "since the averaged weights would not satisfy it, got "
            f"'{_state.path_of(v)}' with {v.constraint!r}.")

  def _make_state(self, variables):
    self._check_innermost()  # A MultiOptimizer has made its optimizers now.
    trained = [v for v in variables
               if not self._overwrite_variable_with_gradient(v)]
    self._z = _state.Row({
        self._var_key(v): self._make_average(v, "z") for v in trained})
    self._schedule_states = self._make_counts(
        "schedule", self._schedule.initial_state(), dtype="float64",
        swapped_in=_schedule_free.holding_x)
    self._begun = self._make_begun()
    self._rows = [_state.Row({
        key: _schedule_free.Interpolated(_value(v), _value(self._z[key]),
                                         _value(self._schedule_states[part]))
        for part, opt in self._parts().items()
        for v in opt._trainable_variables
        if (key := self._var_key(v)) in self._z})]

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

  # At the end of `fit`, x is in all variables, since one number tells for all
  # of them what they hold.

  def assign_averages(self, model: keras.Model, decay: None) -> None:
    self._index_of(decay)
    self._hold_x()

  def _finalized(self, var_list):
    return ()

  def finalize_variable_values(self, var_list: Any) -> None:
    super().finalize_variable_values(var_list)
    if self.built and not self.keeps_raw_weights:
      self._hold_x()

  def _hold_x(self):
    _state.assign_all(self._averaged(None))
    for state in self._schedule_states.values():
      _state.assign(state, _schedule_free.holding_x(state.numpy()))

  # Steps

  def _take(self, step, inner, grads, variables, learning_rate):
    state = _value(self._schedule_states[step.part])
    motion = self._schedule.motion(state.read_value(), learning_rate)
    z = [_value(self._z[key]) for key in step.keys]
    rule = (_rules.schedule_free_rule_of(inner.opt, inner.cls)
            if _replicas.have_copies() else None)
    if rule is not None:
      _rules.apply_schedule_free(inner.opt, rule, step, grads, z, motion,
                                 self._schedule.weight_decay_at_y)
      _replicas.merged(lambda: self._note_step(state, motion))()
    else:
      self._take_around(step, inner, grads, variables, z, motion)
    return True

  def _note_step(self, state, motion):
    state.assign(motion.state)
    self._mark_begun()

  def _take_around(self, step, inner, grads, variables, z, motion):
    """As the inner optimizer takes it, while the variables hold its z."""
    state = _value(self._schedule_states[step.part])
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
           if _takes_over(inner.cls) else {})})
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


def _takes_over(cls):
  """Whether the momentum of optimizers of a class is taken over."""
  return cls in (keras.optimizers.Adam, keras.optimizers.AdamW)


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

