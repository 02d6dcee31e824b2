"""The update rules in float64 NumPy, and how far a kernel may be from them.

The rules are written from their formulas. A kernel's result is right when

    |got - want| <= k * eps * sum |operands|  +  half a step of the storage

k: the roundings that the formula takes. Each is at most half an eps of
  something that is no larger than the sum; the other half is for the reference,
  which rounds too where the kernel computes in float64.
eps: of the type that the kernel computes in: float64 for float64, else float32.
half a step: what the rounding to a narrower storage may add.
"""

import ml_dtypes
import numpy as np

from wrapopt import _native

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALF, FLOAT, DOUBLE = (np.dtype(f"float{bits}") for bits in (16, 32, 64))
DTYPES = (HALF, BFLOAT16, FLOAT, DOUBLE)

# Storage of (states, inputs): of one dtype, or one is float32 and the other
# narrower.
PAIRS = ((HALF, HALF), (HALF, FLOAT), (BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT),
         (FLOAT, FLOAT), (FLOAT, HALF), (FLOAT, BFLOAT16), (DOUBLE, DOUBLE))

# Dtypes of variables that ops move without computing.
PLAIN_DTYPES = [*(np.dtype(name) for name in (
    "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "bool", "complex64", "complex128")), *DTYPES]


def name_of(value):
  """The id of a parameter: of a dtype, of several of them, or another value."""
  if isinstance(value, tuple):
    return "-".join(map(name_of, value))
  return np.dtype(value).name if isinstance(value, type) else str(value)


def random(rng, shape, dtype):
  return np.asarray(rng.standard_normal(shape)).astype(dtype)


def ema(states, inputs, scalars):
  """s' = s + r (v - s)."""
  (s,), (v,), (r,) = states, inputs, scalars
  return [(s + r * (v - s), np.abs(s) + np.abs(r) * (np.abs(v) + np.abs(s)))]


def gradient_descent(states, inputs, scalars):
  """w' = w - lr g."""
  (w,), (g,), (lr,) = states, inputs, scalars
  return [(w - lr * g, np.abs(w) + np.abs(lr * g))]


def momentum(states, inputs, scalars):
  """a' = m a + g; w' = w - lr a', or w - lr (g + m a')."""
  (w, a), (g,), (lr, m, nesterov) = states, inputs, scalars
  new, size = m * a + g, np.abs(m * a) + np.abs(g)
  step = g + m * new if nesterov else new
  step_size = np.abs(g) + m * size if nesterov else size
  return [(w - lr * step, np.abs(w) + lr * step_size), (new, size)]


def adagrad(states, inputs, scalars):
  """a' = a + g^2; w' = w - lr g / sqrt(a')."""
  (w, a), (g,), (lr,) = states, inputs, scalars
  new = a + g * g
  step = lr * g / np.sqrt(new)
  return [(w - step, np.abs(w) + np.abs(step)), (new, new)]


def adadelta(states, inputs, scalars):
  """a' = rho a + (1-rho) g^2; u = sqrt((d+e)/(a'+e)) g; d' likewise by u."""
  (w, a, d), (g,), (lr, rho, e) = states, inputs, scalars
  new = rho * a + (1 - rho) * g * g
  u = np.sqrt((d + e) / (new + e)) * g
  means = rho * d + (1 - rho) * u * u
  return [(w - lr * u, np.abs(w) + np.abs(lr * u)), (new, new), (means, means)]


def rms_prop(states, inputs, scalars):
  """s' = rho s + (1-rho) g^2; m' = mu m + lr g / sqrt(s' + e); w' = w - m'."""
  (w, s, m), (g,), (lr, rho, mu, e) = states, inputs, scalars
  new, size = rho * s + (1 - rho) * g * g, s + (1 - rho) * (g * g + s)
  step = lr * g / np.sqrt(new + e)
  # An error of s' is half as large, relatively, in its root.
  step_size = np.abs(step) * (1 + size / (new + e))
  mom, mom_size = mu * m + step, np.abs(mu * m) + step_size
  return [(w - mom, np.abs(w) + mom_size), (new, size), (mom, mom_size)]


def centered_rms_prop(states, inputs, scalars):
  """As rms_prop, by the variance: s' - c'^2, c' = rho c + (1-rho) g."""
  (w, c, s, m), (g,), (lr, rho, mu, e) = states, inputs, scalars
  mean, mean_size = (rho * c + (1 - rho) * g,
                     np.abs(c) + (1 - rho) * (np.abs(g) + np.abs(c)))
  new, size = rho * s + (1 - rho) * g * g, s + (1 - rho) * (g * g + s)
  variance = new - mean * mean + e
  step = lr * g / np.sqrt(variance)
  step_size = np.abs(step) * (
      1 + (size + 2 * np.abs(mean) * mean_size + e) / variance)
  mom, mom_size = mu * m + step, np.abs(mu * m) + step_size
  return [(w - mom, np.abs(w) + mom_size), (mean, mean_size), (new, size),
          (mom, mom_size)]


def _adam(w, m, v, h, g, lr, b1, b2, e, decay, nesterov, p1, p2):
  rate = lr * np.sqrt(1 - p2) / (1 - p1)
  first, first_size = (b1 * m + (1 - b1) * g,
                       np.abs(m) + (1 - b1) * (np.abs(g) + np.abs(m)))
  second, second_size = (b2 * v + (1 - b2) * g * g, v + (1 - b2) * (g * g + v))
  largest = second if h is None else np.maximum(h, second)
  n = b1 * first + (1 - b1) * g if nesterov else first
  n_size = b1 * first_size + (1 - b1) * np.abs(g) if nesterov else first_size
  root = np.sqrt(largest) + e
  step = rate * n / root
  # Where all gradients were nothing, so is every error.
  relative = second_size / np.where(largest > 0, largest, 1)
  step_size = rate * n_size / root * (1 + relative)
  return [((1 - lr * decay) * w - step, np.abs(w) + step_size),
          (first, first_size), (second, second_size), (largest, second_size
                                                       + largest)]


def adam(states, inputs, scalars):
  """m', v' means of g and g^2; w' = (1 - lr wd) w - r n / (sqrt(v') + e)."""
  return _adam(*states, None, *inputs, *scalars)[:3]


def adam_with_amsgrad(states, inputs, scalars):
  """The same by the largest v' so far."""
  *some, p1, p2 = scalars
  return _adam(*states, *inputs, *some, 0, p1, p2)


def ftrl(states, inputs, scalars):
  """a' = a + g^2; z' = z + h - (sqrt(a') - sqrt(a)) / lr w; w' by shrinkage."""
  (w, a, z), (g,), (lr, l1, l2, shrinkage) = states, inputs, scalars
  new = a + g * g
  moved = (np.sqrt(new) - np.sqrt(a)) / lr * w
  linear = z + g + 2 * shrinkage * w - moved
  size = (np.abs(z) + np.abs(g) + np.abs(2 * shrinkage * w)
          + (np.sqrt(new) + np.sqrt(a)) / lr * np.abs(w))
  below = np.sqrt(new) / lr + 2 * l2
  # Continuous in z', so that rounding on one side of l1 costs no more.
  value = -np.sign(linear) * np.maximum(np.abs(linear) - l1, 0) / below
  return [(value, (size + l1) / below), (new, new), (linear, size)]


def lion(states, inputs, scalars):
  """m' = b2 m + (1-b2) g; w' = (1 - lr wd) w - lr sign(b1 m + (1-b1) g)."""
  (w, m), (g,), (lr, b1, b2, decay) = states, inputs, scalars
  mixed = b1 * m + (1 - b1) * g
  # A sign may be wrong, by two, only where this cancels to few roundings.
  size = np.abs(b1 * m) + np.abs((1 - b1) * g)
  with np.errstate(divide="ignore"):
    cancelled = np.divide(size, np.abs(mixed), where=size > 0,
                          out=np.zeros_like(size))
  return [((1 - lr * decay) * w - lr * np.sign(mixed),
           np.abs(w) + lr * (1 + 2 * cancelled)),
          (b2 * m + (1 - b2) * g, np.abs(b2 * m) + np.abs(g))]


def _decayed(new, w, lr, decay):
  """The same, but that w' is less by lr wd w."""
  (value, size), *others = new
  return [(value - lr * decay * w, size), *others]


def keras_sgd(states, inputs, scalars):
  """w' = (1 - lr wd) w - lr g."""
  lr, decay = scalars
  return _decayed(gradient_descent(states, inputs, [lr]), *states, lr, decay)


def keras_momentum(states, inputs, scalars):
  """v' = m v - lr g; w' = (1 - lr wd) w + v', or + m v' - lr g."""
  (w, v), (g,), (lr, m, decay, nesterov) = states, inputs, scalars
  new, size = m * v - lr * g, np.abs(m * v) + np.abs(lr * g)
  step = m * new - lr * g if nesterov else new
  step_size = m * size + np.abs(lr * g) if nesterov else size
  return _decayed([(w + step, np.abs(w) + step_size), (new, size)],
                  w, lr, decay)


def keras_adagrad(states, inputs, scalars):
  """a' = a + g^2; w' = (1 - lr wd) w - lr g / sqrt(a' + e)."""
  (w, a), (g,), (lr, e, decay) = states, inputs, scalars
  new = a + g * g
  step = lr * g / np.sqrt(new + e)
  return _decayed([(w - step, np.abs(w) + np.abs(step)), (new, new)],
                  w, lr, decay)


def keras_rms_prop(states, inputs, scalars):
  """As rms_prop without momentum; w' is less by lr wd w."""
  lr, rho, e, decay = scalars
  *new, _ = rms_prop([*states, 0], inputs, [lr, rho, 0, e])
  return _decayed(new, states[0], lr, decay)


def keras_centered_rms_prop(states, inputs, scalars):
  """As centered_rms_prop without momentum; w' is less by lr wd w."""
  lr, rho, e, decay = scalars
  *new, _ = centered_rms_prop([*states, 0], inputs, [lr, rho, 0, e])
  return _decayed(new, states[0], lr, decay)


def _schedule_free(around, states, inputs, scalars):
  """z' of a rule from z - lr d y; y' = y + a (z - y) + b (z' - z)."""
  (y, z, *slots), (*scalars, d, a, b) = states, scalars
  lr = scalars[0]
  start_size = np.abs(z) + np.abs(lr * d * y)
  (new, size), *others = around([z - lr * d * y, *slots], inputs, scalars)
  size = size + start_size
  return [(y + a * (z - y) + b * (new - z),
           np.abs(y) + a * (np.abs(z) + np.abs(y)) + b * (size + np.abs(z))),
          (new, size), *others]


def schedule_free_sgd(states, inputs, scalars):
  """Schedule-Free learning around keras_sgd."""
  return _schedule_free(keras_sgd, states, inputs, scalars)


def primal_average_adam(states, inputs, scalars):
  """The same around adam."""
  def around(states, inputs, scalars):
    lr, b1, b2, e, decay, p1, p2 = scalars
    return adam(states, inputs, [lr, b1, b2, e, decay, 0, p1, p2])

  return _schedule_free(around, states, inputs, scalars)


def schedule_free_adam(states, inputs, scalars):
  """The same around adam without the first moment."""
  def around(states, inputs, scalars):
    (w, v), (lr, b2, e, decay, p2) = states, scalars
    of_w, _, of_v = adam([w, np.zeros_like(w), v], inputs,
                         [lr, 0, b2, e, decay, 0, 0, p2])
    return [of_w, of_v]

  return _schedule_free(around, states, inputs, scalars)


def schedule_free_rms_prop(states, inputs, scalars):
  """The same around keras_rms_prop."""
  return _schedule_free(keras_rms_prop, states, inputs, scalars)


def schedule_free_adagrad(states, inputs, scalars):
  """The same around keras_adagrad."""
  return _schedule_free(keras_adagrad, states, inputs, scalars)


def weighted_sum(states, inputs, scalars):
  """m' = m + w x, or w x where it is the first; x counts where w is not 0."""
  (m,), (x,), (w, first) = states, inputs, scalars
  term = w * x if w else np.zeros_like(x)
  if first > 0.5:
    return [(term, np.abs(term))]
  return [(m + term, np.abs(m) + np.abs(term))]


# {rule: (reference, k)}. A reference takes float64 states, inputs and scalars,
# and gives the new value and sum |operands| of each state.
RULES = {
    "Adadelta": (adadelta, 12),
    "Adagrad": (adagrad, 8),
    "KerasAdagrad": (keras_adagrad, 12),
    "Adam": (adam, 16),
    "AdamWithAmsgrad": (adam_with_amsgrad, 16),
    "CenteredRMSProp": (centered_rms_prop, 16),
    "KerasCenteredRMSProp": (keras_centered_rms_prop, 16),
    # Rounded: the rate where it becomes float32, difference, product, sum.
    "Ema": (ema, 4),
    "Ftrl": (ftrl, 12),
    "GradientDescent": (gradient_descent, 4),
    "LazyAdam": (adam, 16),
    "Lion": (lion, 8),
    "Momentum": (momentum, 8),
    "KerasMomentum": (keras_momentum, 8),
    "PrimalAverageAdam": (primal_average_adam, 20),
    "RMSProp": (rms_prop, 12),
    "KerasRMSProp": (keras_rms_prop, 12),
    "KerasSGD": (keras_sgd, 8),
    "ScheduleFreeAdagrad": (schedule_free_adagrad, 16),
    "ScheduleFreeAdam": (schedule_free_adam, 20),
    "ScheduleFreeRMSProp": (schedule_free_rms_prop, 16),
    "ScheduleFreeSGD": (schedule_free_sgd, 16),
    # Rounded: the weight where it becomes float32, product, sum.
    "WeightedSum": (weighted_sum, 3),
}

# States that the formula needs to be at least 0, such as means of squares.
NOT_NEGATIVE = {
    "Adadelta": ("accum", "accum_update"),
    "Adagrad": ("accum",),
    "KerasAdagrad": ("accum",),
    "Adam": ("v",),
    "AdamWithAmsgrad": ("v", "vhat"),
    "LazyAdam": ("v",),
    # A variance above zero needs more than that: no mean is far from zero.
    "CenteredRMSProp": ("rms",),
    "KerasCenteredRMSProp": ("rms",),
    "Ftrl": ("accum",),
    "PrimalAverageAdam": ("v",),
    "RMSProp": ("rms",),
    "KerasRMSProp": ("rms",),
    "ScheduleFreeAdagrad": ("accum",),
    "ScheduleFreeAdam": ("v",),
    "ScheduleFreeRMSProp": ("rms",),
}


if missing := _native.rules().keys() - RULES:
  raise NotImplementedError(
      f"{__name__}.py has no formula for {', '.join(sorted(missing))} of "
      "cc/rules/rules.h. Write it as a function like the others, and add its "
      "line to RULES.")

# {rule: another one whose loops and GPU kernels it has}. The two differ only in
# the step with a sparse gradient.
KERNELS_OF = {"LazyAdam": "Adam"}
WITH_KERNELS = [rule for rule in _native.rules() if rule not in KERNELS_OF]
WITH_GPU_KERNELS = [rule for rule in WITH_KERNELS
                    if _native.rules()[rule].is_update]


def scalars(rule):
  """Scalars that no binary format holds exactly."""
  names = _native.rules()[rule].scalars
  numbers = [0.1 * (k + 1) for k in range(len(names))]
  if "Centered" in rule:
    numbers[names.index("epsilon")] += 50  # Makes the variance positive.
  return numbers


def reference(rule, states, inputs, scalars):
  """What `rule` makes of arrays of any dtype: (values, tolerances) in float64.

  Args:
    rule: Its name.
    states: Arrays.
    inputs: Arrays.
    scalars: Numbers.

  Returns:
    A list with (new value, how far from it a kernel's may be) for each state.
  """
  formula, k = RULES[rule]
  new = formula([np.asarray(s, DOUBLE) for s in states],
                [np.asarray(i, DOUBLE) for i in inputs], scalars)
  return [(value, _tolerance(k, operands, value, states[0].dtype))
          for value, operands in new]


def averaging_assign(target, sources, weights, rate):
  """What AveragingAssign makes of one target: (value, tolerance) in float64.

  m = sum_k w_k x_k; t' = t + r (m - t).

  Args:
    target: An array.
    sources: Arrays.
    weights: As many numbers.
    rate: A number.

  Returns:
    (new value, how far from it the op's may be).
  """
  t = np.asarray(target, DOUBLE)
  terms = [w * np.asarray(x, DOUBLE) for w, x in zip(weights, sources)]
  mean, size = sum(terms), sum(np.abs(term) for term in terms)
  # Rounded: each weight, product and sum, and then four times as in Ema.
  k = len(terms) + 5
  value = t + rate * (mean - t)
  return value, _tolerance(k, np.abs(t) + rate * (size + np.abs(t)), value,
                           target.dtype)


def mean(values, dtype=None):
  """What AveragingMean makes of these: (mean, tolerance) in float64.

  Args:
    values: Arrays of one dtype, whose weights are equal.
    dtype: The variables' dtype, if it is another one.

  Returns:
    (mean, how far from it the op's may be).
  """
  dtype = dtype or values[0].dtype
  values = [np.asarray(x, DOUBLE) for x in values]
  value = sum(values) / len(values)
  # For each value the roundings of Ema, with operands m, x and m again.
  largest = np.max(np.abs(values), axis=0)
  return value, _tolerance(4 * len(values), 3 * largest, value, dtype)


def _tolerance(k, operands, value, dtype):
  storage = ml_dtypes.finfo(dtype)
  compute = ml_dtypes.finfo(DOUBLE if dtype == DOUBLE else FLOAT)
  tolerance = k * (float(compute.eps) * operands
                   + float(compute.smallest_subnormal))
  if storage.bits < compute.bits:
    tolerance = tolerance + np.maximum(
        float(storage.eps) * np.abs(value),
        float(storage.smallest_subnormal)) / 2
  return tolerance


def assert_close(got, want, tolerance, context=""):
  """Asserts |got - want| <= tolerance, and shows the first that is not."""
  got = np.asarray(got, DOUBLE)
  assert got.shape == np.shape(want), (got.shape, np.shape(want), context)
  # So put, a NaN is wrong too.
  wrong = ~(np.abs(got - want) <= tolerance)
  if wrong.any():
    _show(wrong, got, want, context, tolerance)


def assert_same_bits(got, want, context=""):
  """Asserts that two arrays of one dtype are equal bit for bit."""
  got, want = np.asarray(got), np.asarray(want)
  assert (got.dtype, got.shape) == (want.dtype, want.shape), context
  wrong = _bits(got) != _bits(want)
  if wrong.any():
    _show(wrong, got, want, context)


def assert_same_numbers(got, want, context=""):
  """The same, but for a NaN, which may be any NaN."""
  got, want = np.asarray(got), np.asarray(want)
  assert (got.dtype, got.shape) == (want.dtype, want.shape), context
  wrong = (_bits(got) != _bits(want)) & ~(np.isnan(got) & np.isnan(want))
  if wrong.any():
    _show(wrong, got, want, context)


def _bits(array):
  return np.ascontiguousarray(array).view(f"u{array.itemsize}").reshape(
      array.shape)


def _show(wrong, got, want, context, tolerance=None):
  """Fails with the first mismatch and its neighbours."""
  at = int(np.flatnonzero(wrong)[0])
  near = slice(max(0, at - 2), at + 3)
  lines = [f"{int(wrong.sum())} of {wrong.size} differ, the first at [{at}] "
           f"{context}"]
  for name, array in (("got", got), ("want", want), ("tolerance", tolerance)):
    if array is not None:
      array = np.broadcast_to(array, wrong.shape).ravel()
      lines.append(f"  {name}[{near.start}:{near.stop}] = {array[near]!r}")
  raise AssertionError("\n".join(lines))
