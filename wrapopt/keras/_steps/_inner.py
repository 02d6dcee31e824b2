"""The innermost optimizer in wrappers, and its step.

Keras's own code clips and accumulates gradients, scales losses, applies
constraints and counts. Only its innermost update of the variables, which has no
hook around it, is replaced here.
"""

import contextlib
import threading

import keras
import tensorflow as tf

from wrapopt import _lookup_cache
from wrapopt import ops
from wrapopt._averages import _plan
from wrapopt._averages import _replicas
from wrapopt._gates import _records
from wrapopt._gates import _step_lock
from wrapopt._gates import _tokens
from wrapopt.keras._steps import _admission
from wrapopt.keras._steps import _rules
from wrapopt.keras._steps import _step
from wrapopt.keras._variables import value_of


class View:
  """A mixin before the class of an innermost optimizer.

  A view has all attributes of the optimizer, which is not changed.

  Attributes:
    wrapopt_inner: The `Inner` of the optimizer, an attribute of the class.
  """

  def apply(self, grads, trainable_variables=None):
    self.wrapopt_inner.take(
        list(grads), trainable_variables or self._trainable_variables,
        lambda grads: super(View, self).apply(grads, trainable_variables))

  def apply_gradients(self, grads_and_vars):
    grads, variables = zip(*grads_and_vars)
    self.wrapopt_inner.take(
        list(grads), variables, lambda grads: super(View, self).apply_gradients(
            list(zip(grads, variables))))

  def _apply_weight_decay(self, variables):
    pass  # The update includes it.

  def _backend_update_step(self, grads, variables, learning_rate):
    self.wrapopt_inner.update(grads, variables, learning_rate)

  def _backend_increment_gradient_accumulators(self, grads, accumulators):
    self.wrapopt_inner.of_thread.reached += 1
    super()._backend_increment_gradient_accumulators(grads, accumulators)


class _OfThread(threading.local):
  """The step of a thread.

  Attributes:
    reached: The number of steps that Keras's code took or accumulated.
    late: The steps that are followed when Keras's code has ended, or None.
  """

  reached = 0
  late = None


class Inner:
  """An innermost optimizer, with the wrappers around it.

  Attributes:
    cls: Its class.
    opt: A view of it. Its maker sets it.
    outermost: The outermost wrapper, or None if there is none.
    followers: The wrappers that follow its steps, the innermost first.
    of_thread: The step of this thread, an `_OfThread`.
  """

  View = View

  def __init__(self, cls, wrappers):
    self.cls, self.opt = cls, None
    self.outermost = wrappers[-1] if wrappers else None
    self.followers = [f for f in wrappers if not f.is_gate]
    self.of_thread = _OfThread()
    self._sums = any(f.sum_duplicates for f in wrappers)
    self._cache = _lookup_cache.LookupCache()
    self._has_own_apply = not _rules.has_rule(cls) and any(
        getattr(cls, name) is not getattr(keras.optimizers.Optimizer, name)
        for name in ("apply", "apply_gradients", "_backend_apply_gradients"))

  def take(self, grads, variables, apply):
    """Takes a step by Keras's code.

    Args:
      grads: Gradients: tensors, `tf.IndexedSlices` or None.
      variables: Their variables.
      apply: The method of the optimizer, a function of the gradients. In it,
        Keras calls `update`.
    """
    trained = [v for g, v in zip(grads, variables) if g is not None]
    mine, before = self.of_thread, self.of_thread.reached
    number, ahead, late = None, {}, []
    # Its `apply_gradients` calls `apply`, and comes here again.
    if mine.late is None and self._changes_late(trained):
      ahead = {id(f): f._ahead() for f in self.followers}
      mine.late, number = late, tf.convert_to_tensor(self.opt.iterations)
    try:
      apply(grads)
      if mine.reached == before and not all(map(
          self.opt._overwrite_variable_with_gradient, trained)):
        raise NotImplementedError(
            f"{self.cls.__qualname__} inside of "
            f"{type(self.outermost or self.opt).__name__} must update "
            "variables by `_backend_update_step`, got another method. Call "
            "`_backend_update_step` in it, as in Keras.")
    finally:
      if number is not None:
        mine.late = None
    for step in late:
      # In a graph, Keras's branch that takes a step is traced in any case.
      is_taken = (self.opt.gradient_accumulation_steps is None or
                  tf.not_equal(self.opt.iterations, number))
      _step.follow(self.followers,
                        step._replace(iterations=number, ahead=ahead), is_taken)

  def _changes_late(self, variables):
    """Whether Keras or the class may change weights after the update."""
    # Keras's averages are of its own step, not of where a wrapper moves it.
    return self._has_own_apply or bool(self.opt.use_ema and (
        self.opt.ema_overwrite_frequency or
        any(f.changes_weights for f in self.followers))) or any(
            getattr(v, "constraint", None) is not None for v in variables)

  def at_number(self):
    """The context in which scalars of a step are computed."""
    return contextlib.nullcontext()

  @ops.not_converted
  def update(self, grads, variables, learning_rate):
    """Updates variables as the optimizer does, and then runs the followers."""
    mine = self.of_thread
    mine.reached += 1
    step = self._step(variables)
    followers = self.followers
    if followers and followers[0]._take(step, self, grads, variables,
                                        learning_rate):
      return
    with self.at_number():
      rule = _rules.rule_of(self.opt, self.cls)
    by_rule = rule is not None and _replicas.have_copies()
    if step.compensation is not None:
      pairs, after = step.compensation.take(
          [(_rules.cast(g, v.dtype), v) for g, v in zip(grads, step.variables)],
          in_float32=by_rule)
      grads = [g for g, _ in pairs]
      step = step._replace(after=lambda: after(None))
    if by_rule:
      followers = self._update_by_rule(step, rule, grads, variables,
                                       learning_rate)
    else:
      _plan.Plan(grads, step.variables)
      self.cls._apply_weight_decay(self.opt, variables)
      self.cls._backend_update_step(self.opt, grads, variables, learning_rate)
    if mine.late is None:
      _step.follow(followers, step)
    else:
      mine.late.append(step)

  def _step(self, variables):
    """The Step that updates variables."""
    opt, trained = self.opt, self.opt._trainable_variables
    keys = list(map(opt._var_key, variables))
    moved = [v for v in trained if v.trainable or opt._var_key(v) in keys
             ] if any(f.changes_weights for f in self.followers) else []
    return _step.Step(
        tf.convert_to_tensor(opt.iterations),
        list(map(value_of, variables)), keys,
        [(value_of(v), opt._var_key(v)) for v in trained],
        [(value_of(v), opt._var_key(v), v.constraint) for v in moved],
        self._cache)

  def _update_by_rule(self, step, rule, grads, variables, learning_rate):
    """Updates variables by one op for each device and dtype.

    Keras takes the step of a sparse gradient itself, if the op would not sum
    the gradients of a row in the same way.

    Args:
      step: The Step.
      rule: The rule of the optimizer.
      grads: Gradients: tensors or `tf.IndexedSlices`.
      variables: The variables of the gradients.
      learning_rate: A number, tensor or variable.

    Returns:
      The followers whose work the ops have not done.
    """
    opt, others = self.opt, self.followers[1:]
    first = self.followers[0] if self.followers else None
    found = None
    if first is not None and self.of_thread.late is None:
      with self.at_number():
        found = _replicas.merged(lambda: first._averages_of(step))()
    averages, decays = found or ((), ())
    values = _lookup_cache.Variables(step.variables)
    by_keras = [i for i, g in enumerate(grads) if rule.squares and
                not (self._sums or step.compensation) and
                isinstance(g, tf.IndexedSlices)]
    sparse = [grads[i] for i in by_keras]
    if step.compensation is None:  # Else they are of one replica, in float32.
      grads = _rules.reduced(opt, grads, values, by_keras)
    if not rule.sparse:
      grads = list(map(tf.convert_to_tensor, grads))
    groups, apart = self._groups(rule, grads, values, by_keras)
    plan = _plan.Plan(
        grads, values, averages, rule=rule.rule,
        only_touched=not any(f.changes_weights for f in others), all_rows=apart)
    plan.catch_up(by_keras)
    if apart:
      self.cls._apply_weight_decay(opt, [variables[i] for i in apart])
    scalars = {"lr": tf.convert_to_tensor(learning_rate), **rule.scalars}
    accept = step.accept
    if _replicas.is_shared(values[0]):
      *together, accept = ops.together([*scalars.values(), *decays, accept],
                                       opt.iterations.value)
      scalars = dict(zip(scalars, together))
      decays = together[len(scalars):]
    for weight_decay, members in groups:
      if rule.decays_weights:
        scalars["weight_decay"] = weight_decay
      chosen = lambda row: [row[i] for i in members]
      plan.run(_rules.update_of(opt, rule, values, members, step.cache,
                                averages),
               chosen(grads), dict(scalars), decays, accept, members=members)
    if by_keras:
      with plan.moving():
        self.cls._backend_update_step(
            opt, sparse, [variables[i] for i in by_keras], learning_rate)
      _replicas.merged(lambda: plan.update(decays, by_keras))()
    if not found:
      return self.followers
    _replicas.merged(first._note_update)()
    return others

  def _groups(self, rule, grads, values, by_keras):
    """Divides variables by the weight decay that the rule applies.

    Returns:
      ([(weight decay, positions of variables that ops update)], positions of
      those whose weight decay Keras applies).
    """
    decayed, others, apart = [], [], []
    for i, (grad, v) in enumerate(zip(grads, values)):
      decays = (self.opt.weight_decay is not None and
                # As Keras: its name then contains those of its layers.
                self.opt._use_weight_decay(v))
      # For a sparse gradient, a rule may update only some rows. Keras decays
      # all.
      by_rule = rule.decays_weights and not isinstance(grad, tf.IndexedSlices)
      if decays and (i in by_keras or not by_rule):
        apart.append(i)
      if i not in by_keras:
        (decayed if decays and by_rule else others).append(i)
    groups = [(self.opt.weight_decay, decayed), (0.0, others)]
    return [group for group in groups if group[1]], apart


class _AskingView(View):
  """A view in which a step may have a number of its own."""

  @property
  def _iterations(self):
    return self.wrapopt_inner.number or vars(self)["_iterations"]

  def _get_current_learning_rate(self):
    inner = self.wrapopt_inner
    with inner.at_number():
      found = super()._get_current_learning_rate()
      return found if inner.number is None else tf.convert_to_tensor(found)

  def _all_reduce_sum_gradients(self, grads_and_vars):
    return (super()._all_reduce_sum_gradients(grads_and_vars)
            if self.wrapopt_inner.number is None else grads_and_vars)


class AskingInner(Inner):
  """An `Inner` whose steps ask for admission, or have their own numbers."""

  View = _AskingView

  def __init__(self, cls, wrappers, iterations):
    super().__init__(cls, wrappers)
    self._gate = next((f for f in wrappers if f.is_gate), None)
    self._iterations = iterations
    self._is_shared = _replicas.is_shared(iterations)
    self._taken = threading.local()

  @property
  def number(self):
    """The `_admission.StepNumber` of the step of this thread, or None."""
    return getattr(self._taken, "number", None)

  def take(self, grads, variables, apply):
    if self.number is not None or all(g is None for g in grads):
      super().take(grads, variables, apply)
      return
    grads = [g if g is None or isinstance(g, tf.IndexedSlices) else
             tf.convert_to_tensor(g) for g in grads]

    def take():
      grads = asked.grads()
      with self._taking(asked):
        super(AskingInner, self).take(grads, variables, apply)

    with self._asking(grads, variables) as asked:
      _step.where(asked.accept, take)

  def _is_one_op(self, grads, variables):
    """Whether a step is one op on each server, which locks its variables."""
    sparse = any(isinstance(g, tf.IndexedSlices) for g in grads)
    return (_rules.has_rule(self.cls) and
            all(f.in_op for f in self.followers) and
            not any(getattr(v, "constraint", None) for v in variables) and
            not (sparse and (self.opt.weight_decay is not None or (
                not self._sums and
                _rules.rule_of(self.opt, self.cls).squares))))

  @contextlib.contextmanager
  def _asking(self, grads, variables):
    """The context of a step that asks for admission.

    Args:
      grads: Gradients: tensors, `tf.IndexedSlices` or None.
      variables: Their variables.

    Yields:
      An `_admission.Asked`.
    """
    iterations, gate = self._iterations, self._gate
    checks = self.outermost._checks() if self.outermost else []
    is_one_op = self._is_one_op(grads, variables)
    _admission.refuse(self.opt, self.cls.__qualname__)
    if self._is_shared:
      _replicas.check_single_replica(
          type(self.outermost or self.opt).__name__)
    else:
      _replicas.check_alone(type(gate).__name__, iterations)
    # Workers take one step at a time if an op of it reads what another one
    # writes. Without a gate, this is also the order of their numbers. A gate
    # may drop a step, which need not wait for the others.
    locks_first = gate is None and not is_one_op
    with _replicas.unreplicated(self._is_shared):
      # Not before the gradients are ready, so that few steps are in flight at a
      # time. Control edges only: a gradient does not travel before it is
      # admitted.
      with tf.control_dependencies(None):
        token = (_tokens.next_of_function(iterations) if self._is_shared else
                 _tokens.NONE)
        if locks_first:
          grads, ready = _admission.at_servers(grads, variables, iterations)
        else:
          ready = _records.when_ready([g for g in grads if g is not None])
      first, asked = [*ready, *checks], None
      try:
        with (_step_lock.locked(iterations, first=first) if locks_first else
              contextlib.nullcontext()):
          with tf.control_dependencies([] if locks_first else first):
            admitted = (
                _admission.Admitted(*ops.begin_update(iterations, token=token))
                if gate is None else gate._admit(
                    iterations, [(g, value_of(v)) for g, v in zip(
                        grads, variables) if g is not None], token))
          asked = _admission.Asked(
              iterations, admitted, list(zip(grads, variables)), gate,
              is_one_op and admitted.compensation is None)
          del admitted
          yield asked
      finally:
        if asked is not None:
          asked.ticket = None

  @contextlib.contextmanager
  def _taking(self, asked):
    """The context in which a step is taken that was admitted."""
    iterations = self._iterations
    with (_step_lock.locked(iterations) if asked.locks else
          contextlib.nullcontext()):
      self._taken.asked = asked
      self._taken.number = _admission.StepNumber(asked.number, iterations.dtype)
      try:
        with _records.new_stateful_ops() as new:
          yield
      finally:
        self._taken.number = self._taken.asked = None
      with tf.control_dependencies(_records.updates(new)):
        ops.staleness_complete(asked.ticket, iterations)

  @ops.not_converted
  def update(self, grads, variables, learning_rate):
    arrived = []
    # A worker that dies before all gradients have arrived changes nothing on
    # any server. Those of other steps have arrived before the lock.
    if (self._is_shared and not tf.executing_eagerly() and
        self.number is not None and self._taken.asked.is_one_op):
      with tf.control_dependencies(None):
        grads, arrived = _admission.at_servers(grads, variables,
                                               self._iterations)
        for i, variable in enumerate(map(value_of, variables)):
          with ops.device_of(variable):
            grads[i] = _rules.cast(grads[i], variable.dtype)
    with tf.control_dependencies(arrived):
      super().update(grads, variables, learning_rate)

  def _step(self, variables):
    step = super()._step(variables)
    asked = None if self.number is None else self._taken.asked
    return step if asked is None else step._replace(
        accept=asked.accept_in_op, compensation=asked.compensation)

  def at_number(self):
    # In an asynchronous step, the server that has the number.
    return (ops.device_of(self._iterations)
            if self.number is not None and self._is_shared else
            super().at_number())


def asks(iterations, wrappers):
  """Whether the steps of an optimizer in wrappers ask for admission."""
  return _replicas.is_shared(iterations) or any(f.is_gate for f in wrappers)
