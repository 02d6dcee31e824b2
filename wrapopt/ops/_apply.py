"""Steps of optimizers, with averages of the result."""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
from typing import Any, Optional

import tensorflow as tf

from wrapopt import _bundle
from wrapopt import _checks
from wrapopt import _native
from wrapopt._loader import ops as _raw
from wrapopt._types import Bool, Gradient, Operation, Variable
from wrapopt.ops import _check
from wrapopt.ops import _emit
from wrapopt.ops import _lagging
from wrapopt.ops import _variables
from wrapopt.ops._scalars import float64_vector

_RULES = {rule: info for rule, info in _native.rules().items()
          if info.is_update}


@_emit.not_converted
def apply(rule: str, states: Mapping[str, Sequence[Variable]],
          grads: Sequence[Gradient], scalars: Mapping[str, Any],
          shadows: Any = (), decay: Any = (), accept: Bool = True,
          use_locking: bool = True, name: Optional[str] = None,
          log_decays: Sequence[Any] = ()) -> Optional[Operation]:
  """Takes an optimizer's step and averages the result, in one pass over memory.

  For each variable, its slots and its gradient, it applies the update rule of
  that name. cc/rules/<rule>.h has its mathematics, and wrapopt/docs/ops.md its
  states and scalars. Then for each shadow `s` of the new variable `v`

      s += (1 - decay) (v - s)

  Both happen to a part of the arrays while it is in the processor's cache. One
  native op serves all variables that share a device and dtypes. It checks all
  of its variables before it changes any. float16 and bfloat16 are computed in
  float32 and rounded once. A result that is not a number is a NaN on every
  processor, but its sign and payload may depend on the instruction set.

  Example:

  >>> v, s = tf.Variable([1., 2.]), tf.Variable([1., 2.])
  >>> wrapopt.ops.apply("GradientDescent", {"var": [v]},
  ...                   [tf.constant([1., 1.])], {"lr": 0.5}, shadows=[s],
  ...                   decay=0.5)
  >>> v.numpy(), s.numpy()
  (array([0.5, 1.5], dtype=float32), array([0.75, 1.75], dtype=float32))

  Args:
    rule: The name of an update rule, such as "Momentum". The error for an
      unknown name lists them all.
    states: A dict from the names of the rule's states ("var" and the slots) to
      sequences of N variables, float16, bfloat16, float32 or float64. All
      states of a variable have its shape and dtype.
    grads: N tensors or `tf.IndexedSlices`, of the variable's shape, and of its
      dtype or, if it is float16 or bfloat16, float32. Duplicate indices are
      summed. A sparse gradient updates the rows that it holds, or all rows, as
      in TensorFlow (Adam) and Keras (Lion). Averages move in all rows.
    scalars: A dict from the names of the rule's scalars to numbers, tensors or
      variables; `use_nesterov` to a bool, by default False.
    shadows: As in `ema_update`, or empty for none. A variable that has no
      average has None in each sequence: another op takes its step, after those
      of the others.
    decay: As in `ema_update`, or empty for none.
    accept: A bool, or a scalar bool tensor. If it is false, nothing changes and
      the op returns at once. (If XLA compiles the op for another device than a
      CPU, a step that is not accepted takes as long as one that is, unless the
      tensor is a constant.)
    use_locking: Whether the variables are locked against other updates.
    name: A name for the operation.
    log_decays: Empty, or for each shadow a variable as in `catch_up` or None.
      If a shadow has one and its variable has a sparse gradient, the shadow
      moves in the rows that the gradient holds. The others lag behind until
      `catch_up`. This needs a rule that changes no other row.

  Returns:
    As `ema_update`.

  Raises:
    As `ema_update`; tf.errors.InvalidArgumentError also for an index out of
    range, unless XLA has compiled the op to plain HLO.
  """
  update = Update(rule, states, shadows, decay)
  with tf.control_dependencies(_lagging.settle(list(states["var"]))):
    return _emit.result(update.run(
        grads, scalars, decay, accept, use_locking, name, log_decays))


class Update:
  """The variables of an update, checked once for all of its steps: see `apply`.

  Other averages of the variables must be up to date before a step.

  It holds only the handles of resource variables that are trained, not the
  variables.
  """

  def __init__(self, rule, states, shadows=(), decay=(), packed=None):
    """Checks variables.

    Args:
      rule: As in `apply`.
      states: As there.
      shadows: As there.
      decay: As there. Each step may have others.
      packed: Whether the op takes all handles as one tensor, if it can. By
        default only in a `tf.function`: to make that tensor takes as long as a
        step.
    """
    if not isinstance(rule, str) or rule not in _RULES:
      raise ValueError(f"`rule` must be one of {', '.join(sorted(_RULES))}, "
                       f"got {rule!r}.")
    states = {state: _check.variables(f"states['{state}']", variables)
              for state, variables in states.items()}
    names = _RULES[rule].states
    if states.keys() != set(names):
      raise ValueError(f"`states` must hold {', '.join(names)}, got "
                       f"{', '.join(sorted(states))}.")
    variables = states["var"]
    for state, slots in states.items():
      if len(slots) != len(variables):
        raise ValueError(
            f"`states['{state}']` must hold one variable for each of the "
            f"{len(variables)} in states['var'], got {len(slots)}.")
      for i, (slot, var) in enumerate(zip(slots, variables)):
        _check.dtype(
            f"states['{state}'][{i}]", slot,
            _check.FLOATS if state == "var" else (var.dtype.base_dtype,))
        _check.shape(f"states['{state}'][{i}]", slot, f"states['var'][{i}]",
                     var)
    _, shadows = _check.shadows(decay, shadows, variables, "states['var']",
                                some=True)
    self._rule = rule
    self._packed = packed
    self._variables = [
        _VariableInfo(v, [row[i] for row in shadows if row[i] is not None])
        for i, v in enumerate(variables)]
    self._states = {state: list(slots) for state, slots in states.items()}
    self._states["var"] = list(map(_variables.handle_or_ref, variables))
    self._shadows = shadows
    self._groups = {}  # By the kinds of the gradients.

  def run(self, grads, scalars, decay=(), accept=True, use_locking=True,
          name=None, log_decays=()):
    """Takes a step.

    Args:
      grads, scalars, decay, accept, use_locking, name, log_decays: As in
        `apply`.

    Returns:
      The operations in a graph, also in that of a function; else an empty
      list.
    """
    decays = _check.decays(decay)
    grads = _checks.sequence("grads", grads)
    if len(grads) != len(self._variables):
      raise ValueError(f"`grads` must hold one gradient for each of the "
                       f"{len(self._variables)} variables, got {len(grads)}.")
    log_decays = [list(row) for row in log_decays]
    kinds = _common_kind(grads)
    if kinds is None:
      grads, kinds = zip(*[
          self._gradient_and_kind(i, grad, log_decays)
          for i, grad in enumerate(grads)])
    groups = self._groups.get(kinds)
    if groups is None:
      groups = self._groups[kinds] = self._make_groups(
          kinds if isinstance(kinds, tuple) else [kinds] * len(grads))
    updates = []
    with tf.name_scope(name or f"Apply{self._rule}"):
      for group in groups:
        with _after(updates, group):
          updates.append(self._emit(
              group, list(grads) if len(groups) == 1 else
              [grads[i] for i in group.members],
              scalars, decays, accept, use_locking, log_decays))
    return [op for op in updates if op is not None]

  def _gradient_and_kind(self, i, grad, log_decays):
    """A gradient as a tensor or tensors, and its kind for `_parts_of_kind`."""
    if grad is None:
      raise ValueError(
          f"`grads[{i}]` must be the gradient of '{self._variables[i].name}', "
          "got None. Leave out variables without a gradient.")
    if isinstance(grad, tf.IndexedSlices):
      grad = tf.IndexedSlices(tf.convert_to_tensor(grad.values),
                              tf.convert_to_tensor(grad.indices))
      return grad, (grad.dtype.base_dtype, grad.indices.dtype,
                    _has_log_decays(log_decays, self._shadows, i))
    grad = tf.convert_to_tensor(grad)
    # A ref op's output is a ref.
    return grad, grad.dtype.base_dtype.as_datatype_enum

  def _make_groups(self, kinds):
    """A list of groups of variables, given the kinds of their gradients."""
    groups = {}
    for i, (variable, kind) in enumerate(zip(self._variables, kinds)):
      grad_dtype, indices_dtype, lazy = _parts_of_kind(kind)
      dtypes = _check.shadow_dtypes(variable.dtype)
      if grad_dtype not in dtypes:
        raise TypeError(
            f"`grads[{i}]` must be of dtype "
            f"{' or '.join(d.name for d in dtypes)}, got {grad_dtype.name} for "
            f"'{variable.name}'.")
      key = (variable.is_ref, variable.device, variable.dtype, grad_dtype,
             variable.shadow_dtype, indices_dtype, lazy, variable.is_averaged)
      if key not in groups:
        groups[key] = _Group(
            variable, indices_dtype, lazy,
            self._shadows if variable.is_averaged else [],
            follows=bool(self._shadows) and not variable.is_averaged)
      groups[key].members.append(i)
    return sorted(groups.values(), key=lambda group: group.follows)

  def _variables_of(self, group, log_decays):
    """The variables that the group's op updates.

    Returns:
      A list of handles or refs, or of one tensor that holds all handles.
    """
    first = group.first
    bundles = not (first.is_ref or group.indices_dtype or
                   self._packed is None and tf.executing_eagerly()
                   ) and _bundle.allowed()
    if bundles and group.bundle is not None:
      return [group.bundle]
    rows = [self._states[state] for state in _RULES[self._rule].states]
    rows += group.shadows
    if group.lazy:
      rows += log_decays
    flat = [_variables.handle_or_ref(row[i])
            for row in rows for i in group.members]
    if bundles:
      group.bundle = _bundle.make(flat, first.device)
      if group.bundle is not None:
        return [group.bundle]
    return flat

  def _emit(self, group, grads, scalars, decays, accept, use_locking,
            log_decays):
    """Emits the op of a group."""
    first = group.first
    scalars = _scalars_in_order(self._rule, scalars)
    options = {}
    if group.lazy:
      options["NL"] = len(group.shadows) * len(grads)
    variables = self._variables_of(group, log_decays)
    indices = []
    if group.indices_dtype:
      indices = [g.indices for g in grads]
      grads = [g.values for g in grads]
    with _emit.host_of(first):
      scalars = float64_vector(scalars)
      decays = float64_vector(decays if group.shadows else [])
      accept_tensor = tf.convert_to_tensor(accept)
    # A sparse gradient may have any number of rows.
    compiled = (accept is True or tf.executing_eagerly() or all(
        g.shape.rank is not None and
        g.shape[1 if indices else 0:].is_fully_defined() for g in grads))
    op = _raw.wrapopt_apply_ref if first.is_ref else _raw.wrapopt_apply
    # XLA must see each variable, and may be switched on later, in a session.
    compiled = compiled and variables[0] is not group.bundle
    with _emit.device_of(first), _emit.compiled_where(compiled):
      update = op(
          variables, grads, indices, scalars, decays, accept_tensor,
          rule=self._rule, NK=len(group.shadows) * len(grads), T=first.dtype,
          S=first.shadow_dtype, use_locking=use_locking, **options)
    if first.is_ref:
      _emit.note_refs(update, first, variables=variables)
    return update


class _VariableInfo:
  """What an `Update` keeps of a variable."""

  def __init__(self, variable, shadows):
    self.name = variable.name
    self.dtype = variable.dtype.base_dtype
    self.device = variable.device
    self.is_ref = _variables.is_ref(variable)
    dtypes = {s.dtype.base_dtype for s in shadows}
    if len(dtypes) > 1:
      raise TypeError(f"The shadows of '{self.name}' must be of one dtype, got "
                      f"{' and '.join(sorted(d.name for d in dtypes))}.")
    self.shadow_dtype = dtypes.pop() if dtypes else self.dtype
    self.is_averaged = bool(shadows)


class _Group:
  """Variables that one op updates.

  Attributes:
    first: The `_VariableInfo` of one of them.
    indices_dtype: That of sparse gradients; None for dense ones.
    lazy: Whether rows of their averages lag behind.
    shadows: The rows of the Update's averages; none if they have no averages.
    follows: Whether they have none, but others of the Update have.
    members: Their positions among all variables of an `Update`.
    bundle: Their handles as one tensor, once it is made.
  """

  def __init__(self, first, indices_dtype, lazy, shadows, follows):
    self.first = first
    self.indices_dtype = indices_dtype
    self.lazy = lazy
    self.shadows = shadows
    self.follows = follows
    self.members = []
    self.bundle = None


def _after(updates, group):
  """A context in which the op of a group is made after the ops of others.

  An op fails if an average is in place of its variable, or a decay is out of
  range. Then no variable without an average may change either.
  """
  return (tf.control_dependencies([op for op in updates if op is not None])
          if group.follows else contextlib.nullcontext())


def _common_kind(grads):
  """The kind of all gradients, if they are eager, dense and of one dtype."""
  try:
    kinds = set(map(_bundle.EagerTensor._datatype_enum, grads))
  except TypeError:  # Another class.
    return None
  return kinds.pop() if len(kinds) == 1 else None


def _parts_of_kind(kind):
  """(dtype, dtype of the indices or None, whether averages are to lag)."""
  return (kind if isinstance(kind, tuple)
          else (tf.as_dtype(kind), None, False))


def _has_log_decays(log_decays, shadows, i):
  """Whether the shadows of variable `i` have log decays."""
  row = [of_decay[i] for of_decay in log_decays]
  if all(x is None for x in row):
    return False
  if len(row) != len(shadows) or any(x is None for x in row):
    raise ValueError(
        "`log_decays` must hold one variable for each shadow of a variable or "
        f"None for all of them, got {row} for variable {i}.")
  for k, x in enumerate(row):
    _check.variable(f"log_decays[{k}][{i}]", x)
    _check.dtype(f"log_decays[{k}][{i}]", x, (tf.float64,))
  return True


def _scalars_in_order(rule, scalars):
  """The scalars of a rule, a dict, as a list in the order of the rule."""
  names = _RULES[rule].scalars
  # A bool is false by default.
  given = {name[:-1]: False for name in names if name.endswith("?")} | scalars
  names = [name.removesuffix("?") for name in names]
  if given.keys() != set(names):
    raise ValueError(f"`scalars` must hold {', '.join(names)}, got "
                     f"{', '.join(sorted(scalars))}.")
  return [float(x) if isinstance(x, bool) else x
          for x in map(given.get, names)]
