"""Where the averages of a step are moved: in its op or after it.

A wrapper says as data which averages a step must update: `StepAverages`.
Whoever takes the step makes a `Plan` before it. The plan alone decides for each
variable whether its averages move in the native op or after the step, and in
all rows or only in those that the step touches.

A variable that is not averaged has None in place of each average. Of the
variables of a step, those with averages move in one pass with them, and the
others in an op without averages, which runs after it.
"""

import typing

import tensorflow as tf

from wrapopt import _native
from wrapopt import ops
from wrapopt._averages import _decays
from wrapopt._averages import _lazy
from wrapopt._averages import _replicas


class StepAverages(typing.NamedTuple):
  """The averages that a step of an optimizer of tf.compat.v1 must update.

  Attributes:
    variables: The variables of the step that have a gradient, each once.
    shadows_by_decay: For each decay, a list of the averages of `variables`:
      variables or LazyAverages, or None for those that are not averaged.
    stored_by_decay: The variables that store them. In eager mode the same list
      each step, by which facts are found.
    schedule: Their `_decays.Schedule`.
    in_order: Whether a separate op must update them after the step. If not, the
      order of the two is undefined in a graph.
    untrained: For each decay, (variable, average) pairs of variables that the
      step does not train. Their averages are updated after the step. Rows that
      lag behind may catch up later: their values stay, so the order of the
      decays does not matter.
  """
  variables: typing.Sequence[tf.Variable]
  shadows_by_decay: list[list]
  stored_by_decay: list[list]
  schedule: _decays.Schedule
  in_order: bool
  untrained: list[list]

  @property
  def has_trained(self):
    """Whether a variable that the step trains is averaged."""
    return any(s is not None for s in self.shadows_by_decay[0])

  def of(self, variables):
    """`shadows_by_decay` of some of the variables, in their order."""
    position = {id(v): i for i, v in enumerate(self.variables)}
    return [[row[position[id(v)]] for v in variables]
            for row in self.shadows_by_decay]

  def update(self, decays):
    """Updates all rows of the averages, after a step that wrappers took.

    Args:
      decays: The decays of the step.

    Returns:
      An operation in a graph, else None.
    """
    return update_all(
        [_averaged(zip(self.variables, row)) + others for row, others
         in zip(self.shadows_by_decay, self.untrained)], decays)


def touches_few_rows(rule):
  """Whether a rule changes only the rows that a sparse gradient touches.

  Args:
    rule: The name of an update rule, or None for an unknown one.
  """
  return rule is not None and not _native.rules()[rule].all_rows


class Plan:
  """Where each average is moved in one step, and in which rows.

  To make it brings other averages of the variables up to date, where rows lag
  behind: they could not catch up after the step.

  Attributes:
    first: The operations that the step must wait for.
  """

  def __init__(self, grads, variables, shadows_by_decay=(), *, rule=None,
               only_touched=False, all_rows=(), untrained=()):
    """Plans a step, which comes next.

    Args:
      grads: The gradients: tensors or `tf.IndexedSlices`.
      variables: Their variables.
      shadows_by_decay: For each decay, the averages of the variables, or None
        for one that is not averaged; or empty.
      rule: The name of the rule by which the step is taken, or None.
      only_touched: Whether nobody changes other rows after the step than those
        that it touches.
      all_rows: Positions of variables of which the step changes all rows.
      untrained: As in `StepAverages`; or empty.
    """
    self._grads, self._variables = grads, variables
    self._shadows, self._untrained = shadows_by_decay, untrained
    # For each variable its averages, if they move in the touched rows only.
    self._touched = [None] * len(variables)
    # A variable that is listed twice is updated twice.
    if (shadows_by_decay and only_touched and touches_few_rows(rule) and
        any(issubclass(cls, tf.IndexedSlices)
            for cls in set(map(type, grads))) and
        len(set(map(id, variables))) == len(variables)):
      for i, grad in enumerate(grads):
        of_variable = [row[i] for row in shadows_by_decay]
        if (isinstance(grad, tf.IndexedSlices) and i not in all_rows and
            _lazy.let_lag(of_variable)):
          self._touched[i] = of_variable
    self.first = _lazy.settle(variables, self._moved())

  def _moved(self):
    return [s for of_variable in self._touched for s in of_variable or ()]

  def moving(self):
    """The context of a step that no native op takes."""
    return _lazy.moving(self._moved())

  def catch_up(self, members=None):
    """Brings the rows up to date that a step without a native op will touch.

    Args:
      members: The positions of its variables; by default all.

    Returns:
      The operations that the step must wait for.
    """
    caught_up = [s.catch_up(self._grads[i].indices)
                 for i in self._positions(members)
                 for s in self._touched[i] or ()]
    return [op for op in caught_up if op is not None]

  def run(self, update, grads, scalars, decays, *args, members=None,
          **kwargs):
    """Takes a step by a native op, and updates averages in its pass.

    Args:
      update: An `ops.Update` of the variables.
      grads: Their gradients.
      scalars: As in `ops.apply`.
      decays: As there.
      *args: Further arguments of `ops.Update.run`.
      members: The positions of the variables; by default all.
      **kwargs: Further arguments, by name.

    Returns:
      A list of the operations in a graph, else an empty list.
    """
    touched = [self._touched[i] for i in self._positions(members)]
    log_decays = zip(*[
        [s.log_decays for s in of_variable] if of_variable else
        [None] * len(self._shadows) for of_variable in touched]) if any(
            touched) else ()
    return update.run(grads, scalars, decays, *args, log_decays=log_decays,
                      **kwargs)

  def update(self, decays, members=None):
    """Updates averages after a step that no native op has taken.

    Args:
      decays: The decays of the step.
      members: The positions of its variables; by default all, and the averages
        of untrained variables.

    Returns:
      An operation in a graph, else None.
    """
    untrained = self._untrained if members is None else ()
    # A variable that is listed twice has one average.
    members = {id(self._variables[i]): i for i in self._positions(members)
               if self._shadows and self._shadows[0][i] is not None}.values()
    touched = [i for i in members if self._touched[i] is not None]
    others = [i for i in members if self._touched[i] is None]
    rows = [[(self._variables[i], row[i]) for i in others]
            for row in self._shadows]
    if untrained:
      rows = [[*row, *pairs] for row, pairs in zip(rows, untrained)]
    updated = [update_all(rows, decays)] if rows else []
    for k, decay in enumerate(decays if touched else ()):
      averages = [self._touched[i][k] for i in touched]
      updated.append(ops.sparse_ema_update(
          [s.rows for s in averages], [self._variables[i] for i in touched],
          [s.log_decays for s in averages],
          [self._grads[i].indices for i in touched], decay))
    return joined([op for op in updated if op is not None])

  def update_untrained(self, decays, accept):
    """Updates averages of untrained variables, after a native op.

    Args:
      decays: The decays of the step.
      accept: Whether the step is accepted: a bool, or a scalar tensor of it.

    Returns:
      An operation in a graph, else None.
    """
    if not (self._untrained and self._untrained[0]):
      return None
    return update_all(self._untrained, _decays.where_due(accept, decays))

  def _positions(self, members):
    return range(len(self._variables)) if members is None else members


def _averaged(pairs):
  """The (variable, average) pairs of variables that are averaged."""
  return [(v, s) for v, s in pairs if s is not None]


def update_all(pairs_by_decay, decays):
  """Updates all rows of averages.

  Args:
    pairs_by_decay: For each decay, a list of (variable, average), also those of
      a strategy; empty if the step trains no averaged variable.
    decays: The decays.

  Returns:
    An operation in a graph, else None.
  """
  if not pairs_by_decay[0]:
    return None
  if tf.executing_eagerly() and all(
      isinstance(decay, float) and decay == 1 for decay in decays):
    return None  # None moves: an update is not due.
  pairs_by_decay = list(map(_replicas.components, pairs_by_decay))
  return ops.ema_update([[_lazy.stored(s) for _, s in row]
                         for row in pairs_by_decay],
                        [v for v, _ in pairs_by_decay[0]], decays)


def joined(operations):
  """An operation that runs after all `operations`, or None if there is none."""
  return (tf.group(*operations) if operations[1:] else
          operations[0] if operations else None)
