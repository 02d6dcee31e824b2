"""Rules that Keras also has: one step equals one of Keras's optimizer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import numerics
from wrapopt import _native
from wrapopt.ops import apply

_optimizers = keras.optimizers

# {rule: (Keras's optimizer, {state: its list of slots}, scalars)}
# Most scalars become float32 in Keras, before they become float64: they are
# binary fractions.
CASES = {
    "KerasAdagrad": (_optimizers.Adagrad, {"accum": "_accumulators"},
                 {"epsilon": 0.25}),
    "Adam": (_optimizers.Adam, {"m": "_momentums", "v": "_velocities"},
             {"beta1": 0.75, "beta2": 0.5, "epsilon": 0.25}),
    "AdamWithAmsgrad": (
        _optimizers.Adam,
        {"m": "_momentums", "v": "_velocities", "vhat": "_velocity_hats"},
        {"amsgrad": True, "beta1": 0.75, "beta2": 0.5, "epsilon": 0.25}),
    "KerasCenteredRMSProp": (
        _optimizers.RMSprop, {"mg": "_average_gradients", "rms": "_velocities"},
        {"centered": True, "rho": 0.75, "epsilon": 0.25}),
    "Lion": (_optimizers.Lion, {"m": "_momentums"},
             {"beta1": 0.75, "beta2": 0.5}),
    "KerasMomentum": (_optimizers.SGD, {"velocity": "momentums"},
                  {"momentum": 0.75}),
    "KerasMomentum, Nesterov": (
        _optimizers.SGD, {"velocity": "momentums"},
        {"momentum": 0.75, "nesterov": True}),
    "KerasRMSProp": (_optimizers.RMSprop, {"rms": "_velocities"},
                 {"rho": 0.75, "epsilon": 0.25}),
    "KerasSGD": (_optimizers.SGD, {}, {}),
}
LR = 0.125

# Steps of sparse gradients decay the rows that these hold; Keras's, all rows.
DECAY_ROWS = ("KerasAdagrad", "KerasSGD")

# Rows that gradients hold. Keras sums those of one row after it has squared
# them, so that a row counts for less in Adagrad, RMSprop and Adam than it does
# in a dense gradient: Keras is given the sum here, and the op takes it itself.
ROWS = {
    "dense": ([0, 1, 2, 3, 4],) * 3,
    "sparse": ([4, 1], [0, 1], [2]),
    "duplicates": ([4, 1, 4], [0, 0, 1], [2]),
}


@pytest.mark.parametrize("weight_decay, dtype", [
    (0.5, numerics.HALF), (0.5, numerics.BFLOAT16), (0.5, numerics.FLOAT),
    (None, numerics.DOUBLE)], ids=str)
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("case", CASES)
def test_steps(case, weight_decay, kind, dtype):
  cls, slots, arguments = CASES[case]
  rule, _, nesterov = case.partition(", ")
  info = _native.rules()[rule]
  rng = np.random.default_rng(0)
  states = {"var": tf.Variable(rng.standard_normal((5, 3)).astype(dtype))}
  # Keras computes in float64: each step of the op must be its step, rounded.
  theirs = keras.Variable(np.zeros((5, 3)), dtype="float64")
  opt = cls(LR, weight_decay=weight_decay, **{
      {"beta1": "beta_1", "beta2": "beta_2"}.get(name, name): x
      for name, x in arguments.items()})
  opt.build([theirs])
  their_states = {"var": theirs, **{
      name: getattr(opt, slot)[0] for name, slot in slots.items()}}
  for name in slots:
    states[name] = tf.Variable(np.asarray(their_states[name].numpy(), dtype))

  for t, rows in enumerate(ROWS[kind], start=1):
    # Quarters, so that sums of them are exact.
    values = (rng.integers(1, 9, (len(rows), 3))
              * rng.choice([-0.25, 0.25], (len(rows), 3)))
    ours = tf.IndexedSlices(tf.constant(values.astype(dtype)),
                            tf.constant(rows), [5, 3])
    dense = np.zeros((5, 3))
    np.add.at(dense, rows, values)
    grad = tf.constant(dense)
    if kind == "sparse":
      grad = tf.IndexedSlices(tf.constant(values), ours.indices, [5, 3])
    scalars = {**arguments, "lr": LR, "weight_decay": weight_decay or 0.0,
               "use_nesterov": bool(nesterov)}
    scalars.update({f"{beta}_power": scalars[beta]**t
                    for beta in ("beta1", "beta2") if beta in scalars})
    scalars = {name: scalars[name]
               for name in (s.rstrip("?") for s in info.scalars)}

    before = {name: v.numpy() for name, v in states.items()}
    for name, value in before.items():
      their_states[name].assign(np.float64(value))
    opt.apply([grad], [theirs])
    apply(rule, {name: [v] for name, v in states.items()},
          [tf.constant(dense.astype(dtype)) if kind == "dense" else ours],
          scalars)

    as_theirs = range(5)
    if rule in DECAY_ROWS and weight_decay:
      as_theirs = sorted(set(rows))
    others = np.setdiff1d(range(5), as_theirs)
    reference = numerics.reference(
        rule, [before[name] for name in info.states], [dense],
        list(scalars.values()))
    for name, (_, tolerance) in zip(info.states, reference):
      got, context = states[name].numpy(), f"{name}, step {t}"
      numerics.assert_close(
          got[as_theirs], their_states[name].numpy()[as_theirs],
          tolerance[as_theirs], context)
      numerics.assert_same_bits(got[others], before[name][others], context)
