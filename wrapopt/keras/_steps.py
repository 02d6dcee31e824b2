"""Steps of Keras optimizers, followed by the work of wrappers.

Keras's own code clips and accumulates gradients, scales losses, applies
constraints and counts. This module replaces only the innermost update of the
variables.
"""

import threading
import typing

import keras
import tensorflow as tf

from wrapopt import _lookup_cache
from wrapopt import ops
from wrapopt._averages import _lazy
from wrapopt._averages import _plan
from wrapopt._averages import _replicas
from wrapopt.keras import _admission
from wrapopt.keras import _rules

_value = _rules.value


class Step(typing.NamedTuple):
  """A step that an optimizer has taken, or is about to take.

  Attributes:
    iterations: The number of steps before this one: an int64 scalar.
    variables: The tf.Variables that it updates.
    keys: Their keys.
    trained: (tf.Variable, key) of all variables of the optimizer, also of those
      without a gradient.
    constrained: (tf.Variable, constraint) of those that have one, if a wrapper
      may move them after the step.
    cache: A `LookupCache` of the optimizer that takes it, for eager steps.
    accept: True, or a scalar bool tensor: whether it is taken. If it is a
      tensor, one op takes it, or nothing.
    ahead: {id of a follower: what it asked for before Keras took the step}, if
      followers run after Keras has counted it; else None.
  """
  iterations: typing.Any
  variables: list
  keys: list
  trained: list
  constrained: list
  cache: _lookup_cache.LookupCache
  accept: typing.Any = True
  ahead: typing.Any = None

  @property
  def part(self):
    """The key of the first variable of the optimizer that takes the step."""
    return self.trained[0][1]

  def pairs(self, row):
    """[(updated variable, its value in a dict from keys)] of all replicas."""
    return _replicas.components(
        (variable, _lazy.raw(_value(row[key])))
        for variable, key in zip(self.variables, self.keys) if key in row)

  def all_pairs(self, row):
    """The same for all variables that the optimizer trains."""
    return _replicas.components(
        (variable, _lazy.raw(_value(row[key])))
        for variable, key in self.trained if key in row)

  def constrain(self):
    """Applies constraints to weights that a wrapper has moved."""
    for variable, constraint in self.constrained:
      for v in _replicas.values(variable):
        v.assign(constraint(v.read_value()))


def followed(opt, followers):
  """Makes a view of an optimizer whose steps are followed by wrappers' work.

  A view shares all attributes of the optimizer, and is of a subclass of its
  class. The optimizer is not changed.

  Args:
    opt: A `keras.optimizers.Optimizer`, which may hold others, like Keras's
      LossScaleOptimizer and MultiOptimizer.
    followers: Wrappers, the innermost first.

  Returns:
    A view.
  """
  if isinstance(opt, Follower):
    return followed(opt.inner_optimizer, [opt, *followers])
  held = _held(opt)
  if held:
    return view(opt, {
        "_backend_update_step": _refused(type(opt), list(held), followers),
        **{name: _property(name, followers) for name in held}})
  return _followed_innermost(opt, followers)


def _followed_innermost(opt, followers):
  cls = type(opt)
  here = _OfThread()
  has_own_apply = not _rules.has_rule(cls) and any(
      getattr(cls, name) is not getattr(keras.optimizers.Optimizer, name)
      for name in ("apply", "apply_gradients", "_backend_apply_gradients"))
  cache = _lookup_cache.LookupCache()
  outermost = followers[-1]
  wrapper = type(outermost).__name__
  steps = _admission.Steps(cls, wrapper)
  gate = next((f for f in followers if f.is_gate), None)
  sums = any(f.sum_duplicates for f in followers)
  followers = [f for f in followers if not f.is_gate] or [Alone()]

  def apply(self, grads, trainable_variables=None):
    take(self, grads, trainable_variables or self._trainable_variables,
         lambda grads: cls.apply(self, grads, trainable_variables))

  def apply_gradients(self, grads_and_vars):
    grads, variables = zip(*grads_and_vars)
    take(self, grads, variables,
         lambda grads: cls.apply_gradients(self, list(zip(grads, variables))))

  def take(self, grads, variables, apply):
    def checked(grads):
      before, number, ahead = here.reached, None, {}
      # Its `apply_gradients` calls `apply`, and comes here again.
      if here.late is None and changes_late(self, trained):
        here.late, number = [], tf.convert_to_tensor(self.iterations)
        ahead = {id(f): f._ahead() for f in followers}
      try:
        apply(grads)
        check(self, before, trained)
        waiting = here.late if number is not None else []
      finally:
        if number is not None:
          here.late = None
      for step in waiting:
        # In a graph, Keras's branch that takes a step is traced in any case.
        is_taken = (self.gradient_accumulation_steps is None or
                    tf.not_equal(self.iterations, number))
        _follow(followers,
                step._replace(iterations=number, ahead=ahead), is_taken)

    grads = list(grads)
    trained = [v for g, v in zip(grads, variables) if g is not None]
    if all(g is None for g in grads) or not steps.ask_first(self, gate):
      checked(grads)
      return
    grads = [g if g is None or isinstance(g, tf.IndexedSlices) else
             tf.convert_to_tensor(g) for g in grads]

    def taken():
      grads = asked.grads()
      with steps.taking(asked):
        checked(grads)

    one_op = _is_one_op(self, cls, grads, variables, followers, sums)
    with steps.asking(self, grads, variables, gate, outermost._checks(),
                      one_op) as asked:
      where(asked.accept, taken)

  def check(self, before, variables):
    if here.reached == before and not all(map(
        self._overwrite_variable_with_gradient, variables)):
      raise NotImplementedError(
          f"{cls.__qualname__} inside of {wrapper} must "
          "update variables by `_backend_update_step`, got another method. "
          "Call `_backend_update_step` in it, as in Keras.")

  def changes_late(self, variables):
    """Whether Keras or the class may change weights after the update."""
    # Keras's averages are of its own step, not of where a wrapper moves it.
    return has_own_apply or bool(self.use_ema and (
        self.ema_overwrite_frequency or
        any(f.changes_weights for f in followers))) or any(
            getattr(v, "constraint", None) is not None for v in variables)

  def update(self, grads, variables, learning_rate):
    here.reached += 1
    _update(self, cls, grads, variables, learning_rate, followers, sums, cache,
            steps, here.late)

  def accumulate(self, grads, accumulators):
    here.reached += 1
    cls._backend_increment_gradient_accumulators(self, grads, accumulators)

  def rate(self):
    with steps.scalars(self):
      found = cls._get_current_learning_rate(self)
      return found if steps.number is None else tf.convert_to_tensor(found)

  return view(opt, {
      "apply": apply,
      "apply_gradients": apply_gradients,
      "_get_current_learning_rate": rate,
      "_all_reduce_sum_gradients": lambda self, pairs: (
          cls._all_reduce_sum_gradients(self, pairs) if steps.number is None
          else pairs),
      "_iterations": property(
          lambda self: steps.number or vars(self)["_iterations"]),
      # The update includes the weight decay.
      "_apply_weight_decay": lambda self, variables: None,
      "_backend_update_step": update,
      "_backend_increment_gradient_accumulators": accumulate})


class _OfThread(threading.local):
  """What a thread is doing with an optimizer.

  Attributes:
    reached: The number of steps that Keras's code took or accumulated.
    late: The steps that are followed when Keras's code has ended, or None.
  """

  reached = 0
  late = None


def _is_one_op(opt, cls, grads, variables, followers, sums):
  """Whether a step is one op on each server, which locks its variables."""
  sparse = any(isinstance(g, tf.IndexedSlices) for g in grads)
  return (_rules.has_rule(cls) and all(f.in_pass for f in followers) and
          not any(getattr(v, "constraint", None) for v in variables) and
          not (sparse and (opt.weight_decay is not None or (
              not sums and _rules.rule_of(opt, cls).squares))))


def _refused(cls, names, followers):
  def update(self, grads, variables, learning_rate):
    raise NotImplementedError(
        f"{cls.__qualname__} inside of {type(followers[-1]).__name__} must "
        "leave all steps to the optimizers that it holds in "
        f"{', '.join(f'`{name}`' for name in names)}, got a step of its own, "
        "which no average would follow. Use keras.optimizers.MultiOptimizer to "
        "train variables by several optimizers.")

  return update


def within(opt):
  """All optimizers inside of an optimizer, at any depth: an iterator."""
  for x in held_by(opt):
    yield x
    yield from within(x)


def held_by(opt):
  """The optimizers that an optimizer holds directly: a list."""
  if isinstance(opt, Follower):
    return [opt.inner_optimizer]
  return [x for xs in _held(opt).values() for x in tf.nest.flatten(xs)]


def innermost(opt):
  """The optimizers inside of all others, which take the steps: a list."""
  return [x for x in [opt, *within(opt)] if not any(within(x))]


class Follower:
  """The interface of a wrapper in `followed`.

  Attributes:
    changes_weights: Whether `_follow` may change weights that the step did not.
      It then calls the step's `constrain`.
    in_pass: Whether its work is done in the pass of a step that is one op.
    is_gate: Whether `_admit` decides which steps are taken. It does not follow
      them.
    sum_duplicates: The argument of the wrapper.
  """

  changes_weights = False
  in_pass = False
  is_gate = False
  sum_duplicates = False

  @property
  def inner_optimizer(self):
    """The optimizer that this wraps."""
    raise NotImplementedError

  def _checks(self):
    """Operations that fail if no step may be taken now: a list."""
    return []

  def _admit(self, iterations, grads_and_vars, token):
    """Asks for the admission of a step.

    Args:
      iterations: The tf.Variable that counts the steps.
      grads_and_vars: The gradients that are not None, and their tf.Variables.
      token: As in `wrapopt.ops.staleness_gate`.

    Returns:
      An `_admission.Admitted`.
    """
    raise NotImplementedError

  def _take(self, step, opt, cls, grads, variables, learning_rate):
    """Takes a step itself, in place of the optimizer.

    A wrapper that does so has no other around it or inside.

    Args:
      step: A Step, which is about to be taken.
      opt: The view of the innermost optimizer.
      cls: The optimizer's class.
      grads: Gradients: tensors or `tf.IndexedSlices`.
      variables: Their variables.
      learning_rate: The learning rate of the step.

    Returns:
      Whether it has taken it.
    """
    del step, opt, cls, grads, variables, learning_rate
    return False

  def _averages_of(self, step):
    """What to update in the pass of the step, or None.

    Args:
      step: A Step, which is about to be taken. Only the averages that this
        returns may lag behind after it.

    Returns:
      Rows of averages, one for each decay, and the decays. A variable that
      is not averaged has None in each row.
    """
    del step

  def _ahead(self):
    """What the follower reads before Keras counts a step."""

  def _note_update(self):
    """Notes that what `_averages_of` returned has been updated."""

  def _follow(self, step):
    """Does the work of this wrapper after a step.

    Args:
      step: A Step, which was taken.
    """
    raise NotImplementedError


def where(condition, function):
  """Calls `function` if `condition`, True or a scalar bool tensor, is true."""
  if condition is True or tf.executing_eagerly():
    if condition:
      function()
    return

  def called():
    function()
    return True

  tf.cond(condition, called, lambda: False)


class Alone(Follower):
  """Does nothing: for steps that no wrapper follows."""

  in_pass = True

  def _follow(self, step):
    del step


def view(opt, attributes):
  """An object that shares all attributes of an optimizer but some.

  Args:
    opt: A `keras.optimizers.Optimizer`.
    attributes: {name: attribute of the class} of the others.
  """
  cls = type(opt)
  seen = object.__new__(type(cls.__name__, (cls,), {
      "__module__": cls.__module__, "__doc__": cls.__doc__, **attributes}))
  # Keras's __setattr__ would track it as an attribute.
  object.__setattr__(seen, "__dict__", vars(opt))
  return seen


def _held(opt):
  """{attribute: optimizer, or a list, tuple or dict of some} of `opt`."""
  def is_held(x):
    if isinstance(x, dict):
      x = list(x.values())
    return isinstance(x, keras.optimizers.Optimizer) or (
        isinstance(x, (list, tuple)) and x and all(map(is_held, x)))

  return {name: x for name, x in vars(opt).items() if is_held(x)}


def _property(name, followers):
  views = {}  # By id.

  def seen(opt):
    if id(opt) not in views:
      views[id(opt)] = followed(opt, followers)
    return views[id(opt)]

  def get(self):
    return tf.nest.map_structure(seen, vars(self)[name])

  return property(get)


@ops.not_converted
def _update(opt, cls, grads, variables, learning_rate, followers, sums, cache,
            steps, late):
  """Updates variables as `cls` does for `opt`, and then runs the followers.

  If `late` is a list, the followers wait: the step is added to it.
  """
  values = list(map(_value, variables))
  grads, arrived = steps.arrived(opt, grads, values)
  with tf.control_dependencies(arrived):
    _update_here(opt, cls, grads, variables, values, learning_rate, followers,
                 sums, cache, steps, late)


def _update_here(opt, cls, grads, variables, values, learning_rate, followers,
                 sums, cache, steps, late):
  trained = opt._trainable_variables
  step = Step(tf.convert_to_tensor(opt.iterations), values,
              list(map(opt._var_key, variables)),
              [(_value(v), opt._var_key(v)) for v in trained],
              [(_value(v), v.constraint) for v in trained
               if v.constraint is not None] if any(
                   f.changes_weights for f in followers) else [], cache,
              steps.accept)
  if followers[0]._take(step, opt, cls, grads, variables, learning_rate):
    return
  with steps.scalars(opt):
    rule = _rules.rule_of(opt, cls)
  if rule is not None and _replicas.have_copies():
    first, *others = followers
    with steps.scalars(opt):
      averages = None if late is not None else _replicas.merged(
          lambda: first._averages_of(step))()
    _rules.apply(opt, cls, rule, grads, variables, learning_rate,
                 *(averages or ((), ())),
                 rows_stay=not any(f.changes_weights for f in others),
                 sum_duplicates=sums, cache=cache, accept=steps.accept,
                 compensation=steps.compensation)
    if averages:
      _replicas.merged(first._note_update)()
      followers = others
  else:
    _plan.Plan(grads, values)
    cls._apply_weight_decay(opt, variables)
    cls._backend_update_step(opt, grads, variables, learning_rate)
  if late is None:
    _follow(followers, step)
  else:
    late.append(step)


def _follow(followers, step, is_taken=True):
  """Runs followers after a step, if `is_taken`: True, or a bool tensor."""
  def follow():
    for follower in followers:
      follower._follow(step)

  _replicas.merged(lambda: where(is_taken, follow))()
