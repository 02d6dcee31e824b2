"""The averages of an optimizer of tf.compat.v1, in slots."""

import contextlib

import numpy as np
import tensorflow as tf
from tensorflow.python.training import optimizer as tf_optimizer

from wrapopt import _checks
from wrapopt import _lookup_cache
from wrapopt import _types
from wrapopt._averages import _absence
from wrapopt._averages import _choice
from wrapopt._averages import _decays
from wrapopt._averages import _derivation
from wrapopt._averages import _kept_averages
from wrapopt._averages import _lazy
from wrapopt._averages import _may_be_lazy
from wrapopt._averages import _replicas
from wrapopt._averages import _swap
from wrapopt._averages import _write_check
from wrapopt._v1._averages import _slots
from wrapopt._v1._evaluation._swapping_saver import SwappingSaver
from wrapopt._v1._graphs import _initial_value
from wrapopt._v1._graphs import _sessions

_STEPS = "average_steps"


class Averages(_kept_averages.KeptAverages):
  """The averages that a wrapper keeps in its slots.

  Attributes:
    averaged: The `_slots.Averaged` of the optimizer.
    slots: For each decay, the name of the slots that hold its averages.
    names: For each decay, the last part of the names of its averages.
    write_check: Refuses a checkpoint while averages are in place.
  """

  def __init__(self, opt, slot=_slots.SLOT, decays=(None,),
               shadow_dtype=None, lazy=None, variables=None, update_every=1):
    """Makes no average yet.

    Args:
      opt: The wrapper.
      slot: The name of the slots, and the last part of the names of their
        variables.
      decays: The result of `_decays.checked`; None for one without.
      shadow_dtype: The dtype of averages of float16 and bfloat16 variables, or
        None for their own.
      lazy: None, or False if no row of an average may lag behind.
      variables: Which variables are averaged: None for all, a function of a
        variable, or a list.
      update_every: The number of steps between two updates of the averages.
    """
    self._chosen = _choice.checked(variables, _slots.parts_of, "a variable")
    self.update_every = _checks.integer("update_every", update_every, 1)
    super().__init__(list(decays), 0, self.update_every, self._steps_now)
    self._opt, self._shadow_dtype, self._lazy = opt, shadow_dtype, lazy
    # In a `tf.train.Checkpoint`, several are known by their decays.
    numbered = list(map(_slots.numbered, self.decays))
    self._slot = slot
    self.slots = numbered if numbered[1:] else [slot]
    self.names = [slot, *numbered[1:]]
    opt._slots = {name: _slots.Slots() for name in self.slots}
    self.averaged = _slots.Averaged()
    self.write_check = _write_check.WriteCheck(self.check_writable)
    self._cache = _lookup_cache.LookupCache()

  def check_copied(self):
    """Raises an error if a copy would read averages without a value."""
    if self.averaged.swapped_in:
      raise RuntimeError(
          "An optimizer cannot be copied inside averaged_weights: the averages "
          "are in place of the weights. Leave the `with` block first.")

  # Making them

  def chosen_of(self, variables):
    """Those of some variables that are averaged: a list."""
    if self._chosen is None:
      return list(variables)
    averaged = self.averaged.of(_slots.graph_of_state())
    if callable(self._chosen):
      return [v for v in variables if v in averaged or
              _choice.answer(self._chosen, v, v.name)]
    listed = set(map(id, self._chosen))
    return [v for v in variables if v in averaged or id(v) in listed]

  def _listed(self):
    """The variables of a list `variables`, each once: a dict by their ids."""
    return ({} if self._chosen is None or callable(self._chosen) else
            {id(v): v for v in self._chosen})

  def _steps_are_counted(self):
    return self.update_every > 1 or _decays.need_count(self.decays)

  def trained(self, step, in_order=True):
    """Returns the variables that have a gradient, and makes their averages.

    Args:
      step: A Step.
      in_order: Whether the averages must move after the step.
    """
    grads_and_vars = step.grads_and_vars
    if tf.executing_eagerly() and not tf.distribute.has_strategy():
      self.averaged.refuse_swapped_in(None, "apply_gradients")
      _, variables = _lookup_cache.trained(grads_and_vars)
      if self._cache.get(variables) is not None:
        return variables
    # The inner optimizer refuses anything that is not a variable.
    listed = [v for g, v in grads_and_vars
              if g is not None and isinstance(v, tf.Variable)]
    variables = list({v.ref(): v for v in listed}.values())
    averaged = self.averaged.of(_slots.graph_of_state())
    is_got = _slots.check_listed(self._listed().values(), grads_and_vars,
                           averaged.is_got)
    chosen = [*self.chosen_of(variables), *self._untrained(variables)]
    _check_dtypes(chosen)
    if _slots.graph_of_state() is None:
      self.averaged.refuse_swapped_in(None, "apply_gradients")
    # Else, a Plan moves all rows.
    few = step.only_touched and in_order and len(variables) == len(listed)
    sparse = {v.ref() for g, v in grads_and_vars
              if few and isinstance(g, tf.IndexedSlices)}
    # Before the step: in eager mode an average starts at the value then.
    self._create_averages(chosen, sparse)
    averaged.is_got.update(is_got)
    if tf.executing_eagerly() and not tf.distribute.has_strategy():
      shadows = self.by_decay(variables)
      untrained = self.untrained_by_decay(variables)
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
    with self.averaged.lock, tf.init_scope(), self._opt._making_state():
      self.make(variables, sparse)

  def build(self, variables):
    """Makes those of variables that are averaged."""
    chosen = self.chosen_of(variables)
    _check_dtypes(chosen)
    for variable in chosen:
      _swap.check_unoccupied(variable, "build() must not be called")
    self._create_averages(chosen)

  def create(self, variables):
    """As `build`, before a step."""
    self._create_averages(self.chosen_of(variables))

  # Finding them

  def stored(self, variable, k):
    return self._opt._slot(variable, self.slots[k])

  def is_corrected(self, variable, k):
    # A variance that is corrected could be negative.
    return super().is_corrected(variable, k) and variable.trainable

  def group_of(self, variable):
    return _slots.graph_of(variable)

  def _steps_now(self, graph):
    return _replicas.values(self.steps_of(graph))[0].read_value()

  def by_decay(self, variables):
    """The averages of variables, or None for those that are not averaged.

    Returns:
      Two lists with a row for each decay whose averages move: of the variables
      that hold averages, and of the averages.
    """
    facts = self._cache.get(variables) if tf.executing_eagerly() else None
    if facts:
      return facts["shadows"]
    averages = [[self.stored(v, k) for v in variables] for k in self.moving]
    return [[_lazy.stored(s) for s in row] for row in averages], averages

  def untrained_by_decay(self, variables):
    """(variable, average) pairs of `_untrained`, as `_shadows_by_decay`."""
    facts = self._cache.get(variables) if tf.executing_eagerly() else None
    if facts:
      return facts["untrained"]
    untrained = self._untrained(variables)
    return [[(v, self.stored(v, k)) for v in untrained] for k in self.moving]

  def of_variable(self, variable):
    """What is stored for a variable, for each decay: a list."""
    return [self.stored(variable, k) for k in range(len(self.decays))]

  def slot_in_place(self, variable, name):
    """`get_slot` of a name of these slots, which must have a value."""
    found = self._opt._slot(
        variable, self.slots[0] if name == self._slot else name)
    _absence.check(_lazy.stored(found), "get_slot() must not be called",
                    _SlotInPlace)
    return found

  def make(self, variables, sparse):
    if variables and self._steps_are_counted():
      self._opt._create_non_slot_variable(
          np.int64(0), _STEPS, variables[0])
    averaged = self.averaged.of(_slots.graph_of_state())
    new = [v for v in variables if v not in averaged]
    if not tf.executing_eagerly():
      # The collection keeps the variables alive as long as the graph.
      collection = tf.compat.v1.get_collection_ref(
          tf.compat.v1.GraphKeys.MOVING_AVERAGE_VARIABLES)
      before = set(map(id, collection))
      collection += [v for v in new if id(v) not in before]
    for variable in new:
      self.make_of_variable(variable, variable.ref() in sparse)
      self._make_elements(variable)
      averaged.add(variable, self._opt._slots.values())
    if new and not tf.executing_eagerly():
      # Made now, because the graph may be finalized before averaged_weights().
      for k in range(len(self.decays)):
        averaged.swaps[k].append(_swap.SwapInGraph(
            self.pairs(new, k), self.corrected(new, but=k)))

  def _make_elements(self, variable):
    """In a graph, makes what sessions fetch of averages that follow."""
    for k in () if tf.executing_eagerly() else range(len(self.public)):
      average = self.read(variable, k)
      if isinstance(average, _derivation.Derived):
        for part in average.of_replicas():
          part.make_element()

  def make_of_variable(self, variable, is_sparse):
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
    is_lazy = (self._lazy is not False and self._opt._touches_few_rows() and
               (is_sparse or tf.executing_eagerly()))
    if is_lazy and _may_be_lazy.is_hindered_by_ref(variable):
      _may_be_lazy.tell_of_resource_variables(variable)
    make = (self._make_lazy if is_lazy and _may_be_lazy.may_be_lazy(variable)
            else self._opt._get_or_make_slot)
    shadows = [make(variable, value, slot, name)
               for slot, name in zip(self.slots, self.names)]
    if not tf.executing_eagerly():
      _initial_value.start_at_value(shadows, variable)

  def _make_lazy(self, variable, value, slot, op_name):
    """Finds or makes a LazyAverage, as `_get_or_make_slot` a variable."""
    slots, key = self._opt._slot_dict(slot), tf_optimizer._var_key(variable)
    if key not in slots:
      slots[key] = _lazy.make(variable, value, op_name)
      self._opt._restore_slot_variable(slot, variable, slots[key])
    return slots[key]

  # Checkpoints

  def check_writable(self):
    """Raises an error if no checkpoint can hold this optimizer now."""
    # It would hold the two exchanged.
    self.averaged.refuse_swapped_in(None, "tf.train.Checkpoint.write", (
        " To write the averages into a file, use swapping_saver()."))

  def slot_to_restore(self, name, variable):
    """The name of a slot that a Checkpoint calls `name`, which it makes.

    Args:
      name: A name, of these slots or of others of the optimizer.
      variable: The variable of the slot.

    Returns:
      The name, or None if the slot is not restored.
    """
    if not name.startswith(self._slot):
      return name
    self.averaged.refuse_swapped_in(None, "tf.train.Checkpoint.read")
    _slots.check_whole(variable)
    name = self._slot_of_saved(name)
    if name is None or not self.chosen_of([variable]):
      return None
    if tf.executing_eagerly():
      # The base class would name the average after the optimizer, and not start
      # it at the variable's value.
      self._create_averages([variable])
    return name

  def _slot_of_saved(self, name):
    """The slot for averages that a Checkpoint calls `name`, or None."""
    return _slots.slot_of_saved(name, self.decays, self.slots)

  def steps_of(self, graph):
    """The variable that counts the steps of a graph's averages, or None."""
    return self.non_slot(_STEPS, graph)

  def non_slot(self, name, graph):
    """A variable of a graph that is no slot, or None."""
    # Not `_get_non_slot_variable`, which returns that of one replica.
    return self._opt._non_slot_dict.get((name, graph))

  def _check_saved(self, name, saved):
    """Checks the order of the decays of a Saver's file.

    Args:
      name: The name of averages of the first decay.
      saved: All names in the file.
    """
    if f"{name}_{self.decays[0]}" in saved:
      raise _slots.another_first_decay(self.decays, name)

  def pairs_of(self, graph, k):
    """The (variable, average) pairs of a graph."""
    return self.pairs(self.averaged.of(graph), k)

  def average(self, variable, k):
    """What the method `average` returns for a decay by its index."""
    [stored] = readable([self.stored(variable, k)], "average")
    average = None if stored is None else self.read(variable, k)
    if not isinstance(average, _derivation.Derived):
      return average
    return (average.read_value() if _slots.graph_of(variable) is None else
            average._as_graph_element())

  def all(self, graph):
    """All that is stored for a graph's averages: a list."""
    return [self.stored(v, k) for k in range(len(self.decays))
            for v in self.averaged.of(graph)]

  def readable_by_decay(self, graph):
    """[(decay, (variable, average) pairs)] of a graph (None: eager mode)."""
    self.require(graph, "averages_by_decay")
    readable(self.all(graph), "averages_by_decay")
    return [(decay, self.pairs_of(graph, k))
            for k, decay in enumerate(self.public)]

  def _where(self, session, what):
    """The (raw session, graph) of method `what`; (None, None) in eager mode."""
    if session is None and tf.executing_eagerly():
      raw = graph = None
    else:
      raw = _sessions.raw(session)
      graph = raw.graph
    self.require(graph, what)
    self.averaged.refuse_swapped_in(raw, what)
    return raw, graph

  def _counts_of(self, graph):
    """The variables that seeds reset: a list."""
    steps = self.steps_of(graph)
    return [] if steps is None else [steps]

  def seed(self, session, start):
    """Sets all averages to their variables, and all counts to `start`."""
    with self.averaged.swap_lock:
      raw, graph = self._where(session, "seed_averages")
      if raw is None:
        for variable in self.averaged.of(graph):
          for shadow in self.of_variable(variable):
            shadow.assign(tf.cast(variable, shadow.dtype))
        for count in self._counts_of(graph):
          count.assign(start)
        return
      # The initializer of an average takes the value of an initialized
      # variable.
      seeds = [v.initializer
               for x in self.all(graph) + self._counts_of(graph)
               for v in _replicas.values(x)]
      _sessions.in_raw(session, lambda raw: raw.run(seeds))

  # In place of the weights

  @contextlib.contextmanager
  def in_place(self, session, k):
    """`averaged_weights`, of a decay by its index."""
    with self.averaged.swap_lock:
      raw, graph = self._where(session, "averaged_weights")
      if raw is None:
        back = _swap.SwappedIn(
            self.pairs_of(graph, k),
            self.corrected(self.averaged.of(graph), but=k),
            must_stay=True).swap_out
      else:
        averaged = self.averaged.of(graph)
        raw, back = _sessions.in_raw(session, lambda raw: (
            raw, _swap.SwapInGraph.swap_in(averaged.swaps[k], averaged, raw)))
      self.averaged.swapped_in.append(raw)
    try:
      yield
    finally:
      with self.averaged.swap_lock:
        try:
          if raw is None:
            back()
          else:
            # A monitored session that was recreated has restored the raw
            # weights from a checkpoint: there is nothing to put back.
            _sessions.in_raw(
                session, lambda now: back() if now is raw else None)
        finally:
          self.averaged.swapped_in.remove(raw)

  def swapping_saver(self, k, var_list, name, options):
    """`swapping_saver`, of a decay by its index; `options` of a Saver."""
    graph = _slots.graph_of_state()
    self.require(graph, "creating the swapping_saver")
    return SwappingSaver(
        self.pairs_of(graph, k), var_list, self._firsts(graph),
        self._check_saved,
        lambda session: self.averaged.not_swapped_in(session, "swapping_saver"),
        name=name, **options)

  def _firsts(self, graph):
    """The averages of the first decay, whose names have no decay."""
    return [self.stored(v, 0) for v in self.averaged.of(graph)]

  def require(self, graph, what):
    if not self.averaged.of(graph):
      of = ("" if self._chosen is None else
            " with a variable that `variables` selects")
      raise RuntimeError(
          f"Must call apply_gradients or minimize{of} before {what}")


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
    _absence.check(_lazy.stored(s), f"{method}() must not be called")
  return averages
