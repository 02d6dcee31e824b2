"""The averages of an optimizer of tf.compat.v1: made, found, saved."""

import contextlib
from typing import Optional

import numpy as np
import tensorflow as tf
from tensorflow.python.training import optimizer as tf_optimizer

from wrapopt import _checks
from wrapopt import _lookup_cache
from wrapopt import _types
from wrapopt._averages import _chosen
from wrapopt._averages import _decays
from wrapopt._averages import _in_place
from wrapopt._averages import _lazy
from wrapopt._averages import _may_be_lazy
from wrapopt._averages import _replicas
from wrapopt._averages import _swap
from wrapopt._averages import _unwritable
from wrapopt._types import Variable
from wrapopt._v1 import _initial_value
from wrapopt._v1 import _listed
from wrapopt._v1 import _saved_slots
from wrapopt._v1 import _sessions
from wrapopt._v1 import _slots
from wrapopt._v1._swapping_saver import SwappingSaver
from wrapopt._v1._wrapper import WrapperOptimizer

_STEPS = "average_steps"


class AveragingOptimizer(WrapperOptimizer):
  """A wrapper that keeps averages of variables in slots."""

  # The name of the slots, and the last part of the names of their variables.
  _slot_name = _saved_slots.SLOT

  def __init__(self, opt, name, decays, shadow_dtype=None, lazy=None,
               variables=None, update_every=1):
    """Wraps an optimizer.

    Args:
      opt: The inner optimizer.
      name: The name of this one.
      decays: The result of `_decays.with_origins`.
      shadow_dtype: The dtype of averages of float16 and bfloat16 variables, or
        None for their own.
      lazy: None, or False if no row of an average may lag behind.
      variables: Which variables are averaged: None for all, a function of a
        variable, or a list.
      update_every: The number of steps between two updates of the averages.
    """
    super().__init__(opt, name)
    self._chosen = _chosen.checked(variables, _slots.parts_of, "a variable")
    self._update_every = _checks.integer("update_every", update_every, 1)
    self._decays = decays
    self._moving = _decays.moving(decays)
    self._shadow_dtype = shadow_dtype
    self._lazy = lazy
    # The name of the slots that hold a decay's averages: in a
    # `tf.train.Checkpoint`, several are known by their decays.
    self._slot_of_decay = ([self._slot_name] if len(decays) == 1
                           else [_saved_slots.numbered(d) for d in decays])
    # The last part of the names of these averages.
    self._name_of_decay = [self._slot_name,
                           *map(_saved_slots.numbered, decays[1:])]
    self._slots = {slot: _slots.Slots() for slot in self._slot_of_decay}
    self._averaged = _slots.Averaged()
    self._refusal = _unwritable.Refusal(self._check_writable)
    self._cache = _lookup_cache.LookupCache()

  def __reduce_ex__(self, protocol):
    # Before a copy reads averages without a value.
    if self._averaged.swapped_in:
      raise RuntimeError(
          "An optimizer cannot be copied inside averaged_weights: the averages "
          "are in place of the weights. Leave the `with` block first.")
    return super().__reduce_ex__(protocol)

  # Making them

  def _chosen_of(self, variables):
    """Those of some variables that are averaged: a list."""
    if self._chosen is None:
      return list(variables)
    averaged = self._averaged.of(_slots.graph_of_state())
    if callable(self._chosen):
      return [v for v in variables if v in averaged or
              _chosen.answer(self._chosen, v, v.name)]
    listed = set(map(id, self._chosen))
    return [v for v in variables if v in averaged or id(v) in listed]

  def _listed(self):
    """The variables of a list `variables`, each once: a dict by their ids."""
    return ({} if self._chosen is None or callable(self._chosen) else
            {id(v): v for v in self._chosen})

  def _steps_are_counted(self):
    return self._update_every > 1 or _decays.need_count(self._decays)

  def _trained_variables(self, step, in_order=True):
    """Returns the variables that have a gradient, and makes their averages.

    Args:
      step: A Step.
      in_order: Whether the averages must move after the step.
    """
    grads_and_vars = step.grads_and_vars
    if tf.executing_eagerly() and not tf.distribute.has_strategy():
      self._refuse_swapped_in(None, "apply_gradients")
      _, variables = _lookup_cache.trained(grads_and_vars)
      if self._cache.get(variables) is not None:
        return variables
    # The inner optimizer refuses anything that is not a variable.
    listed = [v for g, v in grads_and_vars
              if g is not None and isinstance(v, tf.Variable)]
    variables = list({v.ref(): v for v in listed}.values())
    averaged = self._averaged.of(_slots.graph_of_state())
    is_got = _listed.check(self._listed().values(), grads_and_vars,
                           averaged.is_got)
    chosen = [*self._chosen_of(variables), *self._untrained(variables)]
    _check_dtypes(chosen)
    if _slots.graph_of_state() is None:
      self._refuse_swapped_in(None, "apply_gradients")
    # Else, a Plan moves all rows.
    few = step.rows_stay and in_order and len(variables) == len(listed)
    sparse = {v.ref() for g, v in grads_and_vars
              if few and isinstance(g, tf.IndexedSlices)}
    # Before the step: in eager mode an average starts at the value then.
    self._create_averages(chosen, sparse)
    averaged.is_got.update(is_got)
    if tf.executing_eagerly() and not tf.distribute.has_strategy():
      shadows = self._shadows_by_decay(variables)
      untrained = self._untrained_by_decay(variables)
      self._cache.add(variables).update(shadows=shadows, untrained=untrained)
    return variables

  def _untrained(self, variables):
    """The listed variables that are not among those with a gradient: a list."""
    trained = set(map(id, variables))
    return [v for key, v in self._listed().items() if key not in trained]

  def _create_averages(self, variables, sparse=()):
    """Makes the missing averages of `variables`.

    Args:
      variables: A list.
      sparse: The references of the variables that have a sparse gradient.
    """
    if (_replicas.share_steps() and
        not tf.distribute.in_cross_replica_context()):
      # Once for all replicas, like slots.
      tf.distribute.get_replica_context().merge_call(
          lambda strategy, variables: self._create_averages(variables),
          args=(variables,))
      return
    with self._averaged.lock, tf.init_scope(), self._making_state():
      self._make_averages(variables, sparse)

  def _build(self, variables):
    super()._build(variables)
    chosen = self._chosen_of(variables)
    _check_dtypes(chosen)
    for variable in chosen:
      _swap.check_unoccupied(variable, "build() must not be called")
    self._create_averages(chosen)

  def _create_slots(self, var_list):
    super()._create_slots(var_list)
    self._create_averages(self._chosen_of(var_list))

  # Finding them

  def _slot(self, variable, name):
    """As `get_slot`, also of an average that is in place of its variable."""
    return super().get_slot(variable, name)

  def _shadow(self, variable, k):
    return self._slot(variable, self._slot_of_decay[k])

  def _shadows_by_decay(self, variables):
    """The averages of variables, or None for those that are not averaged.

    Returns:
      Two lists with a row for each decay whose averages move: of the variables
      that hold averages, and of the averages.
    """
    facts = self._cache.get(variables) if tf.executing_eagerly() else None
    if facts:
      return facts["shadows"]
    averages = [[self._shadow(v, k) for v in variables] for k in self._moving]
    return [[_lazy.stored(s) for s in row] for row in averages], averages

  def _untrained_by_decay(self, variables):
    """(variable, average) pairs of `_untrained`, as `_shadows_by_decay`."""
    facts = self._cache.get(variables) if tf.executing_eagerly() else None
    if facts:
      return facts["untrained"]
    untrained = self._untrained(variables)
    return [[(v, self._shadow(v, k)) for v in untrained] for k in self._moving]

  def _shadows(self, variable):
    """The averages of a variable, one for each decay."""
    return [self._shadow(variable, k) for k in range(len(self._decays))]

  def _own_slot_names(self):
    return self._slot_of_decay

  def get_slot(self, var: Variable, name: str) -> Optional[Variable]:
    """The slot `name` of `var`, of the wrapper or of the inner optimizer.

    Args:
      var: A variable.
      name: A string, such as "momentum". "ExponentialMovingAverage" is the
        average of the first decay.

    Returns:
      A variable, or None.

    Raises:
      RuntimeError: In eager mode, if the average is in place of its variable.
    """
    slot = self._slot_of_decay[0] if name == self._slot_name else name
    found = self._slot(var, slot)
    _in_place.check(_lazy.stored(found), "get_slot() must not be called",
                    _SlotInPlace)
    return found

  def variables(self) -> list[Variable]:
    """The state of the inner optimizer and of the wrapper in this graph.

    Returns:
      A list.

    Raises:
      RuntimeError: In eager mode, inside `averaged_weights`.
    """
    return readable(super().variables(), "variables")

  def _make_averages(self, variables, sparse):
    if variables and self._steps_are_counted():
      self._create_non_slot_variable(np.int64(0), _STEPS, variables[0])
    averaged = self._averaged.of(_slots.graph_of_state())
    new = [v for v in variables if v not in averaged]
    if not tf.executing_eagerly():
      # The collection keeps the variables alive as long as the graph.
      collection = tf.compat.v1.get_collection_ref(
          tf.compat.v1.GraphKeys.MOVING_AVERAGE_VARIABLES)
      before = set(map(id, collection))
      collection += [v for v in new if id(v) not in before]
    for variable in new:
      self._make_average(variable, variable.ref() in sparse)
      averaged.add(variable, self._slots.values())
    if new and not tf.executing_eagerly():
      # Made now, because the graph may be finalized before averaged_weights().
      for k in range(len(self._decays)):
        averaged.swaps[k].append(_swap.SwapInGraph(
            self._pairs_of(new, k), self._derived_beside(new, k)))

  def _make_average(self, variable, is_sparse):
    """Makes the missing averages of `variable`, one for each decay.

    Args:
      variable: A variable.
      is_sparse: Whether its gradient is sparse.
    """
    dtype = variable.dtype.base_dtype
    if dtype in _types.LOW_PRECISION and self._shadow_dtype is not None:
      dtype = self._shadow_dtype
    if tf.executing_eagerly():
      if not variable.is_initialized():
        raise RuntimeError(
            f"'{variable.name}' must have a value before its first step, got a "
            "variable that the running tf.function has just made. Make it "
            "before you call the function.")
      value = tf.cast(variable, dtype)
    else:
      value = tf.cast(_initial_value.assigned(
          _replicas.values(variable)[0], variable), dtype)
    # In a graph, a LazyAverage costs ops.
    is_lazy = (self._lazy is not False and self._touches_few_rows() and
               (is_sparse or tf.executing_eagerly()))
    if is_lazy and _may_be_lazy.is_hindered_by_ref(variable):
      _may_be_lazy.tell_of_resource_variables(variable)
    make = (self._make_lazy if is_lazy and _may_be_lazy.may_be_lazy(variable)
            else self._get_or_make_slot)
    shadows = [make(variable, value, slot, name)
               for slot, name in zip(self._slot_of_decay, self._name_of_decay)]
    if not tf.executing_eagerly():
      _initial_value.start_at_value(shadows, variable)

  def _make_lazy(self, variable, value, slot, op_name):
    """Finds or makes a LazyAverage, as `_get_or_make_slot` a variable."""
    slots, key = self._slot_dict(slot), tf_optimizer._var_key(variable)
    if key not in slots:
      slots[key] = _lazy.make(variable, value, op_name)
      self._restore_slot_variable(slot, variable, slots[key])
    return slots[key]

  # Checkpoints

  def _trackable_children(self, save_type="checkpoint", **kwargs):
    return {**(self._refusal.children()
               if save_type == "checkpoint" else {}),
            **super()._trackable_children(save_type, **kwargs)}

  def _check_writable(self):
    """Raises an error if no checkpoint can hold this optimizer now."""
    # It would hold the two exchanged.
    self._refuse_swapped_in(None, "tf.train.Checkpoint.write", (
        " To write the averages into a file, use swapping_saver()."))

  def _create_or_restore_slot_variable(self, slot_variable_position, slot_name,
                                       variable):
    if slot_name.startswith(self._slot_name):
      self._refuse_swapped_in(None, "tf.train.Checkpoint.read")
      _slots.check_whole(variable)
      slot_name = self._slot_of_saved(slot_name)
      if slot_name is None or not self._chosen_of([variable]):
        return
      if tf.executing_eagerly():
        # The base class would name the average after the optimizer, and not
        # start it at the variable's value.
        self._create_averages([variable])
    super()._create_or_restore_slot_variable(
        slot_variable_position=slot_variable_position, slot_name=slot_name,
        variable=variable)

  def _slot_of_saved(self, name):
    """The slot for averages that a Checkpoint calls `name`, or None."""
    return _saved_slots.slot_of(name, self._decays, self._slot_of_decay)

  def _steps_of(self, graph):
    return self._non_slot(_STEPS, graph)

  def _non_slot(self, name, graph):
    # Not `_get_non_slot_variable`, which returns that of one replica.
    return self._non_slot_dict.get((name, graph))

  def _check_saved(self, name, saved):
    """Checks the order of the decays of a Saver's file.

    Args:
      name: The name of averages of the first decay.
      saved: All names in the file.
    """
    if f"{name}_{self._decays[0]}" in saved:
      raise _saved_slots.another_first_decay(self._decays, name)

  def _pairs(self, graph, k):
    return self._pairs_of(self._averaged.of(graph), k)

  def _pairs_of(self, variables, k):
    return [(v, self._shadow(v, k)) for v in variables]

  def _derived_beside(self, variables, k):
    """The derived averages of other decays than that of number k: a list."""
    return []

  def _averages(self, graph):
    return [self._shadow(v, k) for k in range(len(self._decays))
            for v in self._averaged.of(graph)]

  def _where(self, session, what):
    """The (raw session, graph) of method `what`; (None, None) in eager mode."""
    if session is None and tf.executing_eagerly():
      raw = graph = None
    else:
      raw = _sessions.raw(session)
      graph = raw.graph
    self._require_averages(graph, what)
    self._refuse_swapped_in(raw, what)
    return raw, graph

  def _counts_of(self, graph):
    """The variables that seeds reset: a list."""
    steps = self._steps_of(graph)
    return [] if steps is None else [steps]

  def _seed(self, session, start):
    """Sets all averages to their variables, and all counts to `start`."""
    with self._averaged.swap_lock:
      raw, graph = self._where(session, "seed_averages")
      if raw is None:
        for variable in self._averaged.of(graph):
          for shadow in self._shadows(variable):
            shadow.assign(tf.cast(variable, shadow.dtype))
        for count in self._counts_of(graph):
          count.assign(start)
        return
      # The initializer of an average takes the value of an initialized
      # variable.
      seeds = [v.initializer
               for x in self._averages(graph) + self._counts_of(graph)
               for v in _replicas.values(x)]
      _sessions.in_raw(session, lambda raw: raw.run(seeds))

  # In place of the weights

  @contextlib.contextmanager
  def _putting_in_place(self, session, k):
    """`averaged_weights`, of a decay by its index."""
    with self._averaged.swap_lock:
      raw, graph = self._where(session, "averaged_weights")
      if raw is None:
        back = _swap.SwappedIn(
            self._pairs(graph, k),
            self._derived_beside(self._averaged.of(graph), k),
            must_stay=True).swap_out
      else:
        averaged = self._averaged.of(graph)
        raw, back = _sessions.in_raw(session, lambda raw: (
            raw, _swap.SwapInGraph.swap_in(averaged.swaps[k], averaged, raw)))
      self._averaged.swapped_in.append(raw)
    try:
      yield
    finally:
      with self._averaged.swap_lock:
        try:
          if raw is None:
            back()
          else:
            # A monitored session that was recreated has restored the raw
            # weights from a checkpoint: there is nothing to put back.
            _sessions.in_raw(
                session, lambda now: back() if now is raw else None)
        finally:
          self._averaged.swapped_in.remove(raw)

  def _make_swapping_saver(self, k, var_list, name, options):
    """`swapping_saver`, of a decay by its index; `options` of a Saver."""
    graph = _slots.graph_of_state()
    self._require_averages(graph, "creating the swapping_saver")
    return SwappingSaver(
        self._pairs(graph, k), var_list, self._firsts(graph),
        self._check_saved,
        lambda session: self._not_swapped_in(session, "swapping_saver"),
        name=name, **options)

  def _firsts(self, graph):
    """The averages of the first decay, whose names have no decay."""
    return [self._shadow(v, 0) for v in self._averaged.of(graph)]

  def _require_averages(self, graph, what):
    if not self._averaged.of(graph):
      of = ("" if self._chosen is None else
            " with a variable that `variables` selects")
      raise RuntimeError(
          f"Must call apply_gradients or minimize{of} before {what}")

  @contextlib.contextmanager
  def _not_swapped_in(self, session, what):
    """Keeps the averages out of place for a `with` block of method `what`."""
    with self._averaged.swap_lock:
      self._refuse_swapped_in(session, what)
      yield

  @contextlib.contextmanager
  def _holding_swap(self, session):
    """Keeps other threads out of `averaged_weights` for a `with` block.

    Args:
      session: A `tf.compat.v1.Session`.

    Yields:
      Whether the averages are in place of the weights in this session.
    """
    with self._averaged.swap_lock:
      yield self._is_swapped_in(session)

  def _refuse_swapped_in(self, session, what, instead=""):
    if self._is_swapped_in(session):
      raise RuntimeError(
          f"{what} cannot be used inside averaged_weights: the averages are in "
          f"place of the weights. Leave the `with` block first.{instead}")

  def _is_swapped_in(self, session):
    return any(session is s for s in self._averaged.swapped_in)


class _SlotInPlace(RuntimeError, AttributeError):
  """As an AttributeError, it makes tf.saved_model.save leave out the slot."""


def _check_dtypes(variables):
  """Raises an error if a variable cannot be averaged."""
  for variable in variables:
    if variable.dtype.base_dtype not in _types.FLOATS:
      names = [d.name for d in _types.FLOATS]
      raise TypeError(
          f"An averaged variable must be of dtype "
          f"{', '.join(names[:-1])} or {names[-1]}, "
          f"got '{variable.name}' of {variable.dtype.base_dtype.name}.")


def readable(averages, method):
  """Averages, which must have a value in eager mode, for a method: a list."""
  for s in averages:
    _in_place.check(_lazy.stored(s), f"{method}() must not be called")
  return averages
