"""What a call of a raw op must have done, in float64 NumPy.

There is one model for each family of ops. A model also knows what the op must
not have accepted. Variables that a model does not name must be as they were,
bit for bit.

The error bounds of numerics.py hold for ordinary numbers. Elements that
are computed from others (NaN, infinity, huge, subnormal) are not compared, but
their neighbours are.
"""

import math
import re

import numpy as np
import tensorflow as tf

import fuzz_ops_inputs as inputs
import numerics
from fuzz_ops_runs import check_bits

# Processors' threads flush subnormal numbers to zero, or not.
_FLUSHED = 1e-36


class Call:
  """A call that has succeeded, and what it must have done."""

  def __init__(self, case, before, after, outputs, probe, earlier):
    self.case, self.before, self.after = case, before, after
    self.outputs, self.probe, self.earlier = outputs, probe, earlier
    self.touched = set()
    self.compared = self.left_out = 0  # Elements.

  def ids(self, name):
    return self.case.inputs[name]

  def number(self, name):
    [value] = self.case.inputs[name]
    self.demand(value.ndim == 0, f"{name} of shape {value.shape}")
    return value[()]

  def demand(self, condition, what):
    """Fails unless the op was right to accept the call."""
    if not condition:
      raise AssertionError(f"the op accepted {what}")

  def good(self, ids, what):
    for i in ids:
      self.demand(self.before[i] is not None,
                  f"{what}: variable {i}, which has no value")

  def like(self, ids, others, what):
    for i, other in zip(ids, others, strict=True):
      self.demand(self.before[i].shape == self.before[other].shape,
                  f"{what}: variable {i} is not of the shape of {other}")

  def of_dtype(self, ids, dtype, what):
    for i in ids:
      self.demand(self.case.variables[i].dtype == dtype,
                  f"{what}: variable {i} is of another dtype")

  def different(self, written, read=()):
    """Written variables are different, and from those that are read."""
    self.demand(len(set(written)) == len(written), "a variable written twice")
    self.demand(not set(written) & set(read), "a variable written and read")

  def close(self, i, want, tolerance, where, what):
    """Compares a variable's elements `where`; others may be anything."""
    self.touched.add(i)
    got = self.after[i]
    if got is None:
      raise AssertionError(f"{what}: variable {i} has no value any more")
    if got.shape != np.shape(want):
      raise AssertionError(f"{what}: variable {i} is of shape {got.shape}, not "
                           f"{np.shape(want)}")
    most = {2: 6e4}.get(got.itemsize, 1e37) if got.dtype != (
        numerics.BFLOAT16) else 1e37
    with np.errstate(all="ignore"):
      where = (where & np.isfinite(want) & np.isfinite(tolerance) &
               (np.abs(want) + tolerance < most))
    where = np.broadcast_to(where, got.shape)
    self.compared += int(where.sum())
    self.left_out += int((~where).sum())
    numerics.assert_close(got[where], np.asarray(want)[where],
                          np.broadcast_to(tolerance, got.shape)[where]
                          + _FLUSHED, f"of {what}, variable {i}")

  def same(self, i, want, what):
    """Compares all bits of a variable; None: it has no value."""
    self.touched.add(i)
    check_bits(self.after[i], want, f"{what}, variable {i}")

  def rest(self):
    """All others are as they were."""
    for i, (was, now) in enumerate(zip(self.before, self.after)):
      if i not in self.touched:
        check_bits(now, was, f"variable {i}, which the op must not change")


def _tame(*arrays):
  """Where all numbers are ordinary."""
  result = np.bool_(True)
  for x in arrays:
    x = np.abs(np.asarray(x, np.float64))
    with np.errstate(invalid="ignore"):
      result = result & ((x == 0) | (x >= 1e-6) & (x <= 1e4))
  return result


def _sane(scalars):
  """Whether numbers.py's bounds hold for such scalars."""
  return all(x in (0., 1., 50.) or 0.001 <= x <= 0.95 for x in scalars)


def _decays(call, k):
  [decays] = call.ids("decays")
  call.demand(decays.shape == (k,), f"decays of shape {decays.shape}")
  call.demand(all(0 <= d <= 1 for d in decays), f"decays of {decays}")
  return decays.astype(float)


def _average(call, shadow, old, value, rate, where=True, extra=0.):
  """Compares a shadow that has moved by `rate` towards a value."""
  with np.errstate(all="ignore"):
    [(want, tolerance)] = numerics.reference("Ema", [old], [value], [rate])
    # The numbers that it was made of may be off already.
    tolerance = tolerance + extra
  call.close(shadow, want, tolerance, where & _tame(old, value), "an average")


# Apply.


def _lists(call, *counts):
  """The lists in the op's input "variables"."""
  ids = list(call.ids("variables"))
  if call.case.bundle in ("scalar", "empty"):
    ids = ids[:call.case.bundle == "scalar"]
  call.demand(len(ids) == sum(counts), f"{len(ids)} variables, not {counts}")
  ends = np.cumsum(counts)
  return [ids[end - count:end] for end, count in zip(ends, counts)]


def _made_zeros(call, log_decays):
  """Allows what XLA's programs assign where no row lags behind.

  Log decays without a value become the zeros they stand for, and zeros may
  change their sign.
  """
  if call.case.mode != "jit":
    return
  for i in log_decays:
    if call.before[i] is None and call.after[i] is not None:
      call.same(i, np.zeros(len(call.after[i])), "log decays")
    elif np.array_equal(call.before[i], call.after[i]):
      call.touched.add(i)


def _indices(call, i, shape):
  indices = call.ids("indices")[i]
  call.demand(indices.ndim == 1, f"indices of shape {indices.shape}")
  call.demand(bool(shape), "rows of a scalar")
  call.demand(((indices >= 0) & (indices < shape[0])).all(),
              f"indices {indices[:9]} of {shape[0]} rows")
  return indices


def _dense_gradient(grad, indices, shape):
  """(sum of the gradients of each row, where that is ordinary)."""
  total = np.zeros(shape, np.float64)
  wild = np.zeros(shape, bool)
  with np.errstate(all="ignore"):
    np.add.at(total, indices, np.asarray(grad, np.float64))
  np.logical_or.at(wild, indices, ~_tame(grad))
  return total, ~wild


def _apply(call):
  case, attrs = call.case, call.case.attrs
  n, k, lazy = attrs["N"], attrs["NK"] // attrs["N"], attrs.get("NL", 0)
  if not call.number("accept"):
    _made_zeros(call, call.ids("variables")[-lazy:] if lazy else ())
    return
  name, rule = inputs.rule_of(case)
  call.demand(not attrs["policy"], f"the policy {attrs['policy']}")
  *states, shadows, log_decays = _lists(
      call, *[n] * len(rule.states), n * k, lazy)
  written = [i for s in states for i in s] + shadows
  decays = _decays(call, k)
  call.good(written, "Apply")
  call.different(written + log_decays)
  for ids in states:
    call.of_dtype(ids, attrs["T"], "a state")
    call.like(ids, states[0], "a state")
  call.of_dtype(shadows, attrs["S"], "a shadow")
  call.like(shadows, states[0] * k, "a shadow")
  [scalars] = call.ids("scalars")
  call.demand(scalars.shape == (len(rule.scalars),), "so many scalars")
  numbers = [float(x > 0) if s.endswith("?") else float(x)
             for s, x in zip(rule.scalars, scalars)]
  sane = _sane(numbers) and not (
      "Centered" in name and numbers[rule.scalars.index("epsilon")] < 50)
  for i in range(n):
    _apply_to(call, name, rule, [s[i] for s in states], i, numbers, sane)
    for j in range(k):
      shadow = shadows[j * n + i]
      old, value = call.before[shadow], call.after[states[0][i]]
      if log_decays:
        _lazy(call, shadow, log_decays[j * n + i],
              call.before[states[0][i]], value, decays[j],
              call.ids("indices")[i])
      else:
        _average(call, shadow, old, value, 1 - decays[j])


def _apply_to(call, name, rule, states, i, scalars, sane):
  before = [call.before[s] for s in states]
  shape = before[0].shape
  grad = call.ids("grad")[i]
  touched = np.ones(shape, bool)
  if call.ids("indices"):
    indices = _indices(call, i, shape)
    call.demand(grad.shape == (len(indices), *shape[1:]),
                f"a gradient of shape {grad.shape} for {len(indices)} rows of "
                f"{shape}")
    touched[:] = False
    touched[indices] = True
    grad, where = _dense_gradient(grad, indices, shape)
  else:
    call.demand(grad.shape == shape, f"a gradient of shape {grad.shape}")
    where = _tame(grad)
  moved = np.ones(shape, bool) if rule.all_rows else touched
  where = where & _tame(*before)
  for state, x in zip(rule.states, before):
    if state in numerics.NOT_NEGATIVE.get(name, ()):
      where = where & (np.asarray(x, np.float64) >= 0.01)
  with np.errstate(all="ignore"):
    made = numerics.reference(name, before, [grad], scalars)
  for state, (want, tolerance), old, label in zip(
      states, made, before, rule.states):
    call.close(state, want, tolerance, where & moved & sane, f"{name}.{label}")
    check_bits(call.after[state][~moved], old[~moved],
               f"rows of {label} without a gradient")


# Averages of all rows, and of some.


def _ema_update(call):
  attrs = call.case.attrs
  n, k = attrs["N"], attrs["NK"] // attrs["N"]
  shadows, values = _lists(call, n * k, n)
  decays = _decays(call, k)
  _check_averages(call, shadows, values, k)
  for i, value in enumerate(values):
    for j in range(k):
      shadow = shadows[j * n + i]
      _average(call, shadow, call.before[shadow], call.before[value],
               1 - decays[j])


def _check_averages(call, shadows, values, k):
  attrs = call.case.attrs
  call.good(shadows + values, "an average")
  call.different(shadows, values)
  call.of_dtype(values, attrs["T"], "a value")
  call.of_dtype(shadows, attrs["S"], "a shadow")
  call.like(shadows, values * k, "a shadow")


def _sums(call, log_decays, rows):
  """(sums of the rows, sum of all steps), zeros for one without a value."""
  sums = call.before[log_decays]
  if sums is None:
    return np.zeros(rows), 0.
  call.demand(sums.shape == (rows + 2,), f"log_decays of shape {sums.shape}")
  return sums[:rows], sums[rows]


def _lazy(call, shadow, log_decays, old_value, new_value, decay, rows):
  """A shadow whose rows lag behind: `rows`, or all if None, move.

  Args:
    call: A Call.
    shadow: A variable.
    log_decays: Its log decays'.
    old_value: What the value was before the step.
    new_value: What it is after the step.
    decay: That of the step; None if there is none.
    rows: Indices, or None.
  """
  call.touched.update([shadow, log_decays])
  old = call.before[shadow]
  count = old.shape[0]
  sums, total = _sums(call, log_decays, count)
  if not (np.isfinite(sums).all() and -1e5 < total <= 0 and
          (total - sums <= 0).all() and (sums <= 0).all()):
    return  # No steps leave such sums.
  lags = total - sums
  moved = np.zeros(count, bool)
  if rows is not None:
    moved[rows] = True
  elif total != 0:
    moved[:] = True
  column = lambda x: np.asarray(x, float).reshape(
      (count,) + (1,) * (old.ndim - 1))
  caught = -np.expm1(np.maximum(lags, -40))
  with np.errstate(all="ignore"):
    formula, k = numerics.RULES["Ema"]
    [(want, operands)] = formula([np.asarray(old, float)],
                                 [np.asarray(old_value, float)],
                                 [column(caught)])
    bound = numerics._tolerance(2 * k, operands, want, old.dtype)
    if decay is not None:
      [(want, operands)] = formula([want], [np.asarray(new_value, float)],
                                   [1 - decay])
      bound = bound + numerics._tolerance(k, operands + bound, want, old.dtype)
  where = _tame(old, old_value, new_value) & column(moved).astype(bool)
  call.close(shadow, want, bound, where, "an average of rows")
  check_bits(call.after[shadow][~moved], old[~moved],
             "rows of an average that lag behind")
  after = call.after[log_decays]
  if call.case.mode == "jit" and (
      call.case.variables[log_decays].kind in ("table", "iterator")):
    return  # A limitation of XLA, to which such a handle has no value.
  if after is None or after.shape != (count + 2,):
    raise AssertionError("log_decays got no value")
  if rows is None:
    want_lags = np.zeros(count) if total else lags
  else:
    step = 0.
    if decay is not None:
      step = max(math.log(decay), -40.) if decay else -40.
    want_lags = np.where(moved, 0, lags + step)
  if old.size == 0:
    return  # Rows without elements may be said to lag behind or not.
  got = after[count] - after[:count]
  clip = lambda x: np.maximum(x, -40)
  np.testing.assert_allclose(clip(got), clip(want_lags), rtol=1e-9, atol=1e-9,
                             err_msg="lags of rows")


def _lagging(kind):
  def model(call):
    attrs = call.case.attrs
    n, k = attrs["N"], attrs["NK"] // attrs["N"]
    shadows, values, log_decays = (
        call.ids(x) for x in ("shadows", "values", "log_decays"))
    behind = any(
        (x := call.before[i]) is not None and x.size >= 2 and x[-2] != 0
        for i in log_decays)
    if kind == "read":
      for shadow, out in zip(shadows, call.outputs, strict=True):
        check_bits(out, call.after[shadow], "what ReadAverages outputs")
    if kind != "step" and not behind:
      _made_zeros(call, call.ids("log_decays"))
      return
    decays = _decays(call, k) if kind == "step" else [None] * k
    _check_averages(call, shadows, values, k)
    call.different(shadows + log_decays, values)
    rows = call.case.inputs.get("indices") or None
    for i, value in enumerate(values):
      shape = call.before[value].shape
      indices = _indices(call, i, shape) if rows else None
      for j in range(k):
        x = call.before[value]
        _lazy(call, shadows[j * n + i], log_decays[j * n + i], x, x, decays[j],
              indices)
  return model


# AveragingAssign.


def _averaging_assign(call):
  attrs, n = call.case.attrs, call.case.attrs["N"]
  targets, sources = call.ids("targets"), call.ids("sources")
  tensors = call.ids("tensors")
  [weights] = call.ids("weights")
  rate = float(call.number("rate"))
  for some, what in ((targets, "targets"), (sources, "sources"),
                     (tensors, "tensors")):
    call.demand(len(some) % n == 0, f"{len(some)} {what} for N = {n}")
  count = (len(sources) + len(tensors)) // n
  call.demand(count > 0 and targets, "no sources or no targets")
  call.demand(weights.shape == (count,), f"weights of shape {weights.shape}")
  # A limitation that wrapopt.ops documents: XLA's program does not check these.
  odd = not np.isfinite(weights).all() or not 0 <= rate <= 1
  call.demand(not odd or call.case.mode == "jit", f"{weights} or rate {rate}")
  call.good(targets + sources, "an average")
  call.different(targets)
  for ids, what in (targets, "target"), (sources, "source"):
    call.like(ids, [targets[p % n] for p in range(len(ids))], f"a {what}")
    allowed = {attrs["T"]} | ({inputs.FLOAT} if attrs["T"] in inputs.LOW
                              else set())
    for p, i in enumerate(ids):
      dtype = call.case.variables[i].dtype
      call.demand(dtype in allowed and dtype == (
          call.case.variables[ids[p - p % n]].dtype), f"a {what} of {dtype}")
  for p, i in enumerate(sources):
    call.demand(i not in targets or targets.index(i) % n == p % n,
                "a target that is another's source")
  for i in range(n):
    given = [call.before[s] for s in sources[i::n]] + tensors[i::n]
    counted = [(w, x) for w, x in zip(weights, given) if w]
    some = [x for _, x in counted]
    for x in some:
      call.demand(x.shape == call.before[targets[i]].shape,
                  f"a source of shape {x.shape}")
    for target in targets[i::n]:
      if odd:
        call.touched.add(target)
        continue
      old = call.before[target]
      if rate == 0:
        call.same(target, old, "a target at rate 0")
        continue
      start = np.zeros_like(old) if rate == 1 else old
      with np.errstate(all="ignore"):
        want, tolerance = numerics.averaging_assign(
            start, some or [np.zeros_like(old)],
            [w for w, _ in counted] or [0.], rate)
      where = _tame(start, *some) & _tame(*weights)
      call.close(target, want, tolerance, where, "a mean")


# Ops that move bits.


def _exchange(call):
  a, b = call.ids("a"), call.ids("b")
  call.good(a + b, "an exchange")
  call.different(a + b)
  for x, y in zip(a, b, strict=True):
    call.same(x, call.before[y], "an exchange")
    call.same(y, call.before[x], "an exchange")


def _move(call):
  source, to = call.ids("from"), call.ids("to")
  call.good(source, "a move")
  call.different(source + to)
  for x, y in zip(source, to, strict=True):
    call.same(y, call.before[x], "a move")
    # To TensorFlow, a ref variable without elements has a value if its shape is
    # known.
    if call.case.mode == "ref-graph" and not call.before[x].size:
      call.touched.add(x)
    else:
      call.same(x, None, "a move")
  [replaced] = call.outputs
  want = any(call.before[y] is not None and call.before[y].size for y in to)
  if bool(replaced) != want:
    raise AssertionError(f"replaced is {replaced}, want {want}")


def _check_initialized(call):
  call.good(call.ids("variables"), "a check")


def _packed(call, ids):
  call.good(ids, "a bundle")
  call.of_dtype(ids, call.case.attrs["T"], "a bundle")
  return np.concatenate([call.before[i].reshape(-1) for i in ids])


def _read_packed(call):
  check_bits(call.outputs[0], _packed(call, call.ids("variables")), "packed")


def _assign_packed(call):
  ids = call.ids("variables")
  total = _packed(call, ids).size
  call.different(ids)
  [packed] = call.ids("packed")
  call.demand(packed.shape == (total,), f"packed of shape {packed.shape}")
  for i in ids:
    old = call.before[i]
    part, packed = packed[:old.size], packed[old.size:]
    # Of quantized numbers there are the bits.
    call.same(i, part.view(old.dtype).reshape(old.shape), "packed")


def _bundle(call):
  if len(call.outputs) != 1:
    raise AssertionError("Bundle must have one output")


def _bundle_by_name(call):
  _bundle(call)
  attrs = call.case.attrs
  lengths = {len(attrs[x]) for x in
             ("containers", "shared_names", "dtypes", "shapes")}
  call.demand(len(lengths) == 1, "lists of one length")
  call.demand(all(attrs["shared_names"]), "names")


# The staleness gate. Of steps, the probe tells what the process remembers.


def _step(call):
  [step] = call.ids("step")
  call.good([step], "a step")
  value = call.before[step]
  call.demand(value.shape == () and value.dtype in (np.int32, np.int64),
              f"a step of {value.dtype} {value.shape}")
  return step, int(value)


def _clip(x):
  return min(max(x, -2**63), 2**63 - 1)


def _record(call):
  _, value = _step(call)
  recorded, in_flight = (int(x) for x in call.outputs)
  if in_flight < 0 or recorded < value or [recorded, in_flight] != call.probe:
    raise AssertionError(f"recorded {recorded}, in flight {in_flight} at step "
                         f"{value}; before: {call.probe}")


def _gate(call):
  step, _ = _step(call)
  [counter], [histogram] = call.ids("stale_counter"), call.ids("histogram")
  call.good([counter, histogram], "a gate")
  call.different([counter, histogram], [step])
  counts = call.before[histogram]
  call.demand(counts.dtype == np.int64 and counts.ndim == 2 and
              counts.shape[0] == 2 and counts.shape[1] > 0,
              f"a histogram of shape {counts.shape}")
  old = call.before[counter]
  call.demand(old.dtype == np.float32 and old.shape == (), "such a counter")
  recorded, limit = int(call.number("recorded")), int(call.number("limit"))
  token = int(call.number("token"))
  accept, staleness, number = (int(call.outputs[i]) for i in (0, 1, 3))
  # The end of a call aborts the update that it admitted, which may be tried
  # again. An update that was dropped may not.
  is_over = token >= 0 and any(not outputs[0] for outputs in call.earlier)
  now, in_flight = call.probe
  if is_over:
    if (accept, staleness, number) != (False, -1, -1):
      raise AssertionError(f"a second try: accept {accept}, staleness "
                           f"{staleness}, number {number}")
  else:
    if in_flight == 0 and staleness != _clip(now - recorded):
      raise AssertionError(
          f"staleness {staleness} of record {recorded} at {now}")
    if accept != (0 <= limit and staleness <= limit):
      raise AssertionError(f"accept {accept} at {staleness} of {limit}")
    _check_number(call, accept, number)
  want = counts.copy()
  if not is_over:
    bucket = min(max(staleness, 0), counts.shape[1] - 1)
    cell = want[int(not accept)]
    cell[bucket] = _clip(int(cell[bucket]) + 1)
  # It takes the updates back that were aborted since the last call.
  for lost in range(want.shape[1]) if now > _step(call)[1] else ():
    if call.after[histogram][0, lost] == _clip(int(want[0, lost]) - 1):
      want[0, lost] = _clip(int(want[0, lost]) - 1)
  call.same(histogram, want, "a histogram")
  with np.errstate(all="ignore"):
    call.close(counter, old + np.float32(not accept and not is_over), 0.,
               _tame(old), "a counter")


def _check_number(call, accept, number):
  """Without others in flight, an update's number is the step."""
  _, step = _step(call)
  want = step if accept else -1
  if number != want and not (accept and call.probe[1] > 0):
    raise AssertionError(f"number {number} at step {step}, want {want}")


def _complete(call):
  step, value = _step(call)
  if call.case.attrs["increment"]:
    dtype = call.before[step].dtype
    want = np.array(value + 1).astype(object)
    bits = 8 * dtype.itemsize
    wrapped = (int(want) + 2**(bits - 1)) % 2**bits - 2**(bits - 1)
    call.same(step, np.array(wrapped, dtype), "a step")


def _begin(call):
  _step(call)
  call.number("token")
  # No update of a case becomes complete, so none is over.
  if not call.outputs[0]:
    raise AssertionError("an update that is not over was not accepted")
  _check_number(call, True, int(call.outputs[1]))


# The lock of steps: nothing changes.


def _lock(call):
  del call


# Averaging rounds: the first call of a case finds them as they were made.


def _place(call):
  [place] = call.ids("place")
  call.demand(place.shape == (2,) and place[0] < 2**63 - 1, f"place {place}")
  return tuple(place.tolist())


def _told(call):
  """What the op is told: (place, closed, turn, newest, alive, workers)."""
  [known] = call.ids("known")
  call.demand(known.ndim == 1 and known.size > 0 and re.fullmatch(
      r"-?\d+( -?\d+){4,}", str(known[0])), f"what it is told: {known}")
  round_, generation, closed, turn, newest, *alive = (
      int(x) for x in str(known[0]).split(" "))
  call.demand(round_ < 2**63 - 1, f"round {round_}")
  call.demand(all(-2**63 <= x < 2**63 for x in (
      round_, generation, closed, turn, newest, *alive)), "large integers")
  return ((round_, generation), closed != 0, turn, newest, alive,
          [str(x) for x in known[1:]])


def _want(got, want, what):
  if tuple(np.ravel(got).tolist()) != tuple(np.ravel(want).tolist()):
    raise AssertionError(f"{what} is {got}, want {want}")


def _want_members(known, members):
  """They are told in the order in which they came."""
  _want(sorted(known[1:]), sorted(w.encode() for w in members), "the members")


def _enter(call):
  rounds, place = call.case.rounds, _place(call)
  most, worker = int(call.number("most_turns")), call.number("worker")
  call.demand(most >= 0, f"most_turns = {most}")
  call.demand(call.number("turn_secs") > 0, "such a turn")
  call.demand(call.case.attrs["stopped_secs"] >= 0, "such a time for the chief")
  call.demand(call.number("timeout_secs") > 0, "such a timeout")
  known = {*rounds.members, *rounds.staged}
  call.demand(worker in known or len(known) < rounds.workers,
              "too many workers")
  turn = -1
  if _has_turn(rounds, place, most, worker):
    # If the worker has one, it ends.
    others = rounds.alive.keys() - {worker}
    call.demand(len(others) < max(most, 1), "too many turns")
    turn = len(rounds.members) + len(rounds.staged) + 1
  _want(call.outputs[0], turn, "the turn")
  _want_members(call.outputs[1], rounds.members)


def _has_turn(rounds, place, most, worker):
  return place == rounds.place and (most == 0 or (
      not rounds.is_closed and worker not in rounds.members))


def _stage(call):
  rounds, worker = call.case.rounds, call.number("worker")
  place, _, turn, newest, alive, workers = _told(call)
  n, restores = len(rounds.sizes), place[1] > rounds.place[1]
  call.demand(rounds.center is not None if restores else
              rounds.center is None or rounds.place[1], "such a center")
  weight = call.number("weight")
  call.demand(0 <= weight < np.inf, f"weight {weight}")
  count, first = int(call.number("count")), int(call.number("first"))
  least = n if restores or weight else 0
  call.demand(least <= count <= (2 * n if restores else least),
              f"count = {count}")
  values = call.ids("values")
  call.demand(0 <= first <= count - len(values), f"first = {first}")
  for value in values:  # It may be that of several vectors.
    dtype = tf.as_dtype(value.dtype).as_datatype_enum
    call.demand(value.ndim == 1, "such a shape")
    left = None
    while left is None or left > 0:
      call.demand(first < count, "more values")
      left = (value.size if left is None else left) - rounds.sizes[first % n]
      call.demand(left >= 0, "such a shape")
      of = rounds.dtypes[first % n]
      call.demand(dtype == of or not restores and dtype in inputs.LOW and
                  of == inputs.FLOAT, f"a value of {value.dtype}")
      first += 1
  members = set(rounds.members)
  if place == rounds.place:
    members |= set(rounds.staged) & set(workers)
  if place != rounds.place or newest <= rounds.newest:
    newest, alive = rounds.newest, rounds.alive.values()
  _want(call.outputs[0], restores or (
      place == rounds.place and not rounds.is_closed and
      worker not in members and (turn > newest or turn in alive)), "accepted")


def _arrive(call):
  rounds, worker = call.case.rounds, call.number("worker")
  place, _, turn, *_ = _told(call)
  accepted = (place == rounds.place and not rounds.is_closed and
              rounds.alive.get(worker) == turn)
  members = {*rounds.members, worker} if accepted else rounds.members
  _want(call.outputs[0], accepted, "accepted")
  _want_members(call.outputs[1], members)


def _release(call):
  call.number("worker")
  _want(call.outputs[0],
        call.number("turn") in call.case.rounds.alive.values(), "was_alive")


def _leave(call):
  rounds, worker = call.case.rounds, call.number("worker")
  is_known = worker in {*rounds.members, *rounds.staged}
  _want(call.outputs[0], not is_known or call.number("process") == 0,
        "has_left")


def _follow(call):
  _want(call.outputs[0], _told(call)[0] == call.case.rounds.place, "accepted")


def _close(call):
  rounds, place = call.case.rounds, _place(call)
  least = int(call.number("min_workers"))
  call.demand(1 <= least <= rounds.workers, f"min_workers = {least}")
  call.demand(call.number("timeout_secs") > 0, "such a timeout")
  call.demand(call.number("grace_secs") >= 0, "such a grace")
  call.demand(call.case.attrs["stopped_secs"] >= 0, "such a time for the chief")
  members = sorted(rounds.members) if place == rounds.place else []
  call.demand(place != rounds.place or rounds.is_closed or
              len(members) >= least, "too few workers")
  _want(call.outputs[0], [x.encode() for x in (
      f"{place[0]} {place[1]} 1 -1 -1", *members)], "known")


def _restore(call):
  rounds, place = call.case.rounds, _place(call)
  call.demand(place[0] >= 0, "such a round")
  restored = (call.number("from_generation") == rounds.place[1] < place[1])
  call.demand(not restored or rounds.center is None or
              place[0] == rounds.place[0] or rounds.offered is not None and
              place == inputs.OFFERED and
              call.number("worker") == inputs.CENTRAL, "no center")
  _want(call.outputs[0], restored, "restored")


def _state(call):
  rounds = call.case.rounds
  has_center = rounds.center is not None and rounds.place[1] > 0
  _want(call.outputs[0], rounds.place, "the place")
  _want(call.outputs[1], [x.encode() for x in rounds.known()], "known")
  *numbers, number, job = call.outputs[2]
  _want(numbers, [
      len(rounds.sizes) * has_center, 0,
      len(rounds.staged) + (rounds.offered is not None)], "the numbers")
  if number <= 0 or job != 0:
    raise AssertionError(f"the rounds have the numbers {number} and {job}")
  _want(call.outputs[3], [], "who has left")


def _join(call):
  rounds, worker = call.case.rounds, call.number("worker")
  known = {*rounds.members, *rounds.staged}
  call.demand(
      call.number("resumes") or call.number("process") == 0
      if worker in known else len(known) < rounds.workers,
      "the name of another, or too many")
  _want(call.outputs[0], len({*known, worker}), "the workers")


def _list(call):
  names, settings, numbers = call.outputs
  if not len(names) == len(settings) == len(numbers):
    raise AssertionError("each of the rounds must have settings and numbers")


def _drop(call):
  _want(call.outputs[0], False, "dropped")


def _end(call):
  """Whether the call ends the round, which must be closed then."""
  rounds = call.case.rounds
  place, closed, *_, workers = _told(call)
  is_open = place == rounds.place
  if is_open:
    members = set(rounds.members) | set(rounds.staged) & set(workers)
    call.demand(closed and workers == sorted(members) and members,
                f"the end of a round of {workers}")
  _want(call.outputs[0], (rounds.place[0] + is_open, rounds.place[1]),
        "the place")
  return [{**rounds.members, **rounds.staged}[w] for w in workers
          ] if is_open else []


def _outer_step(call):
  call.demand(0 < call.number("learning_rate") < np.inf, "a learning rate")
  call.demand(0 <= call.number("momentum") < 1, "such a momentum")
  call.number("stepped")
  call.demand(not _end(call) or call.case.rounds.center is not None,
              "a center in variables")


def _mean(call):
  values = _end(call)
  sizes, rounds = call.case.attrs["sizes"], call.case.rounds
  ids = [*call.ids("resources"), *call.ids("refs")]
  if not values:
    return
  call.good(ids, "a mean")
  call.different(ids)
  call.demand(len(sizes) == len(rounds.sizes), "such sizes")
  for i, size in enumerate(sizes):
    of, ids = ids[:size], ids[size:]
    dtype = call.case.variables[of[0]].dtype
    call.of_dtype(of, dtype, "a mean")
    call.demand(dtype == rounds.dtypes[i] or dtype in inputs.LOW and
                rounds.dtypes[i] == inputs.FLOAT, "variables of this dtype")
    call.demand(sum(call.before[k].size for k in of) == rounds.sizes[i],
                "variables of these sizes")
    given = [v[i].astype(inputs.numpy_dtype(rounds.dtypes[i])) for v in values]
    want, tolerance = numerics.mean(given, call.before[of[0]].dtype)
    tolerance = np.broadcast_to(tolerance, want.shape)
    for k in of:
      shape, n = call.before[k].shape, call.before[k].size
      call.close(k, want[:n].reshape(shape), tolerance[:n].reshape(shape),
                 np.bool_(True), "a mean of workers")
      want, tolerance = want[n:], tolerance[n:]
  for k in ids:
    old = call.before[k]
    # As tf.assign_add: it may be of any real numbers.
    call.demand((tf.as_dtype(old.dtype).is_floating or old.dtype.kind in "iu")
                and old.shape == (), "such a counter")
    with np.errstate(over="ignore"):
      call.same(k, old + old.dtype.type(1), "a counter")


def _center(call):
  rounds, index = call.case.rounds, int(call.number("index"))
  call.number("worker")
  call.demand(call.number("timeout_secs") > 0, "such a timeout")
  attrs, end = call.case.attrs, index + int(call.number("count"))
  call.demand(rounds.center is not None and rounds.place[1] > 0 and
              0 <= index < end <= len(rounds.sizes) and
              attrs["what"] == "center" and
              {attrs["T"]} == {*rounds.dtypes[index:end]},
              f"center {index} to {end}")
  _want(call.outputs[0], rounds.place, "the place")
  check_bits(call.outputs[1], np.concatenate(rounds.center[index:end]),
             "the center")


def _rounds(call):
  if len(call.outputs) != 1:
    raise AssertionError("AveragingRounds must have one output")


def _clock(call):
  if not call.outputs[0] > 0:
    raise AssertionError(f"the time is {call.outputs[0]}")


def _raise(call):
  call.number("message")
  call.demand(call.number("code") == 0, "an error")


_MODELS = {
    "Apply": _apply,
    "AssignPacked": _assign_packed,
    "AveragingAssign": _averaging_assign,
    **(_OF_ROUNDS := {
        "AveragingArrive": _arrive, "AveragingCenter": _center,
        "AveragingClose": _close, "AveragingEnter": _enter,
        "AveragingFollow": _follow, "AveragingJoin": _join,
        "AveragingLeave": _leave, "AveragingRelease": _release,
        "AveragingMean": _mean, "AveragingOuterStep": _outer_step,
        "AveragingRestore": _restore, "AveragingStage": _stage,
        "AveragingState": _state}),
    "AveragingClock": _clock,
    "AveragingDrop": _drop,
    "AveragingList": _list,
    "AveragingRaise": _raise,
    "AveragingRounds": _rounds,
    "BeginUpdate": _begin,
    "Bundle": _bundle,
    "BundleByName": _bundle_by_name,
    "CatchUp": _lagging("catch up"),
    "CheckInitialized": _check_initialized,
    "EmaUpdate": _ema_update,
    "Exchange": _exchange,
    "LockSteps": _lock,
    "Move": _move,
    "ReadAverages": _lagging("read"),
    "ReadPacked": _read_packed,
    "SparseEmaUpdate": _lagging("step"),
    "StalenessComplete": _complete,
    "StalenessGate": _gate,
    "StalenessRecord": _record,
    "UnlockSteps": _lock,
}

# The second call finds what the first has made of a state that no model knows.
ONE_CALL = tuple(_OF_ROUNDS)


def model_of(op):
  """The model of an op, or None."""
  return _MODELS.get(inputs.family(op))


# A refusal has one of these: our rules, or TensorFlow's own words.
_TOLD = re.compile(
    "must .*, got |misshapen: got .* but expected |must be named once|"
    "must not be empty|must be one of |is not a variable|"
    "is not initialized: |is another process |have num_workers = .*, but |"
    "within .* seconds|was cancelled: |[Cc]ancelled before|"
    "nsupported operations when|uninitialized value|Cannot place|"
    "Detected at node|located in device|Timed out waiting|allowed values|"
    "passed string|Value for attr|invalid characters|out of range|"
    "less than minimum|at least minimum|shorter than minimum|"
    "as long as the others|not match|don't all match", re.S)


def tells(case, error):
  """Whether an error of a refused call tells what is wrong."""
  return inputs.family(case.op) == "AveragingRaise" or _TOLD.search(error)


def may_refuse(case, before):
  """Whether an op may refuse what the maker of cases has made for it.

  Args:
    case: A Case.
    before: What its variables held before the call.

  Returns:
    A bool.
  """
  family = inputs.family(case.op)
  if family == "Move":  # The second call finds nothing to move.
    return any(before[i] is None for i in case.inputs["from"])
  rounds = case.rounds
  if family in ("AveragingMean", "AveragingOuterStep"):
    return not rounds.is_closed
  if family not in ("AveragingClose", "AveragingEnter"):
    return False
  place = tuple(case.inputs["place"][0].tolist())
  if family == "AveragingClose":
    return place == rounds.place and not rounds.is_closed and (
        len(rounds.members) < rounds.workers)
  most, worker = int(case.inputs["most_turns"][0]), case.inputs["worker"][0][()]
  return len(rounds.members) == rounds.workers and (
      worker not in rounds.members) or (
          _has_turn(rounds, place, most, worker) and
          len(rounds.alive) >= max(most, 1))


def check(case, before, after, outputs, probe, earlier):
  """Raises AssertionError if a call that succeeded is not what it must be.

  Args:
    case: A Case.
    before: What its variables held before the call.
    after: The same after it.
    outputs: Of the call.
    probe: What the world's `probe` said before the call.
    earlier: The outputs of each earlier call of the case that succeeded.

  Returns:
    The numbers of elements that were computed and compared, and of those that
    were not compared.
  """
  model = model_of(case.op)
  if model is None:
    return 0, 0
  call = Call(case, before, after, outputs, probe, earlier)
  if case.mode != "jit" or any(x is None or x.size for x in before):
    model(call)
  # Otherwise XLA leaves out the call, and the checks of its numbers with it.
  call.rest()
  return call.compared, call.left_out
