"""wrapopt.keras.ScheduleFree against `schedulefree`, the authors' package."""

import json
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import wrapopt.keras as wk

K = keras.optimizers
START = np.linspace(-2, 2, 12).reshape(4, 3)
NOISE = np.random.default_rng(1).normal(size=(200, 4, 3))
RATES = {60: 0.5, 120: 2.0}  # Factors of the learning rate.


class Subclass(K.SGD):
  """Has no op: it takes its step from z itself."""


CASES = {
    "sgd": lambda: wk.ScheduleFree(
        K.SGD(0.25), warmup_steps=50, r=1.5, weight_decay_at_y=0.03125),
    "adamw": lambda: wk.ScheduleFree(
        K.Adam(0.0625, epsilon=1e-12), warmup_steps=50, r=0.5,
        weight_lr_power=1.0, weight_decay_at_y=0.03125),
    "wrapper": lambda: wk.ScheduleFree(
        K.SGD(0.25, weight_decay=0.0625), 0.75, weight_decay_at_y=0.125),
    "wrapper in two passes": lambda: wk.ScheduleFree(
        Subclass(0.25, weight_decay=0.0625), 0.75, weight_decay_at_y=0.125),
}


@pytest.fixture(scope="module")
def reference():
  python = pathlib.Path(sys.prefix).parent / ".venv-torch/bin/python"
  assert python.exists(), (
      f"there is no {python}: ./tools/test --nightly makes it")
  program = pathlib.Path(__file__).parent / "schedule_free_reference.py"
  done = subprocess.run(
      [python, program], check=True, capture_output=True, text=True,
      input=json.dumps({"start": START.tolist(), "noise": NOISE.tolist(),
                        "rates": RATES}))
  return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_trajectory(case, reference):
  v = keras.Variable(START, dtype="float64")
  opt = CASES[case]()
  opt.build([v])
  for t, noise in enumerate(NOISE):
    opt.learning_rate = float(opt.learning_rate) * RATES.get(t, 1.0)
    opt.apply([tf.constant(0.5 * v.numpy() + noise)], [v])
  assert opt.fused == ("two passes" not in case)
  want = reference[case.split()[0]]
  for name, got in (("x", opt.average(v)), ("y", v), ("z", opt.z(v))):
    np.testing.assert_allclose(got.numpy(), want[name], 1e-9, 1e-11)
    assert np.abs(np.array(want[name]) - START).max() > 0.5
