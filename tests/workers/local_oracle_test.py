"""DiLoCo in `fit` of real processes is what NumPy makes of it."""

import os
import signal
import threading

import numpy as np
import pytest
import tensorflow as tf

import codes
from local_parts import CodedOracle, Oracle, run_all, Servers
import wrapopt
from wrapopt import server as server_module

ROUNDS = 20


def steps_of(k):
  """The number of steps of worker k in a round, which is its weight."""
  return 1 + k % 3


def deltas(k):
  """How far its steps go: [rounds, steps, 5]."""
  return np.random.default_rng(k).normal(
      size=(ROUNDS, steps_of(k), 5)).astype(np.float32)


def fit(xs, diloco, epochs=1, backups=None, die=False):
  """Trains; with folders for backups, and dies in the last but one epoch."""
  import keras  # pylint: disable=g-import-not-at-top
  import wrapopt.keras  # pylint: disable=g-import-not-at-top,redefined-outer-name
  model = keras.Sequential([keras.Input([5]), keras.layers.Dense(
      1, use_bias=False, kernel_initializer="zeros")])
  # Gradient descent adds the batch to the weights.
  model.compile(keras.optimizers.SGD(1.0),
                lambda y, p: -tf.reduce_sum(p, axis=-1))
  callbacks = [wrapopt.keras.LocalRounds(
      diloco(model.trainable_variables),
      backup_dir=backups and os.path.join(backups, "local"))]
  if backups:
    callbacks.append(keras.callbacks.BackupAndRestore(
        os.path.join(backups, "keras")))

  class Death(keras.callbacks.Callback):

    def on_epoch_begin(self, epoch, logs=None):
      self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
      if self.epoch == epochs - 2 and batch == len(xs) - 2:
        os.kill(os.getpid(), signal.SIGKILL)

  if die:
    callbacks.append(Death())
  model.fit(xs, np.zeros(len(xs)), 1, epochs, verbose=0, shuffle=False,
            callbacks=callbacks)
  return model.get_weights()[0][:, 0]


def fit_on(k, servers, folder, die, pipe):
  """A process: five rounds in an epoch."""
  diloco = lambda variables: wrapopt.DiLoCo(
      variables, servers, f"w{k}", 2, steps_of(k), round_timeout_secs=120)
  xs = deltas(k)[:5].reshape([-1, 5])
  pipe.send(fit(xs, diloco, ROUNDS // 5, f"{folder}/{k}", die))


def test_a_job_in_fit_that_was_killed(tmp_path):
  """New servers and workers go on from the backups, as if nothing was."""
  for die in True, False:
    with Servers() as servers:
      workers, pipes = zip(*[servers.start(
          fit_on, k, servers.addresses, tmp_path, die) for k in range(2)])
      if die:
        workers[-1].join(120)
        assert workers[-1].exitcode == -signal.SIGKILL
        assert all((tmp_path / f"{k}/local/center/checkpoint").exists()
                   for k in range(2))
      else:
        centers = [pipe.recv() for pipe in pipes]
  oracle = Oracle(np.zeros(5))
  for r in range(ROUNDS):
    oracle.end_round(
        [oracle.center + deltas(k)[r % 5].sum(axis=0) for k in range(2)],
        [steps_of(k) for k in range(2)])
  for center in centers:
    np.testing.assert_array_equal(center, centers[0])
    np.testing.assert_allclose(center, oracle.center, rtol=0, atol=1e-4)
  assert not any((tmp_path / f"{k}/local/center").exists() for k in range(2))


SHAPES = (3,), (2, 2), (), (6,)
# The ends of the fragments, by their number: the largest is the smallest.
ENDS = {1: [14], 2: [7, 14], 3: [3, 8, 14]}
AWAY = range(5, 9)  # The exchanges without the second worker.


def streaming(deltas, ends, overlap_steps, local_weight):
  """What the paper of Streaming DiLoCo makes of two workers' steps.

  Args:
    deltas: For each worker, how far its steps go: [exchanges, steps, values].
    ends: Those of the fragments.
    overlap_steps: Its tau.
    local_weight: Its alpha.

  Returns:
    For each worker, its values after each step; those of an exchange that it
    is away from are 0.
  """
  fragments = [slice(*x) for x in zip([0, *ends], ends)]
  oracles = [Oracle(np.zeros(s.stop - s.start)) for s in fragments]
  values = [np.zeros(ends[-1]) for _ in deltas]
  steps = np.zeros([len(deltas), len(ends)])  # Since the last round of each.
  seen = [np.zeros(d.shape) for d in deltas]

  def merge(k, e):
    s, oracle = fragments[e % len(ends)], oracles[e % len(ends)]
    values[k][s] = (local_weight * values[k][s] +
                    (1 - local_weight) * oracle.center)

  for e in range(len(deltas[0])):
    here = [0] if e in AWAY else [0, 1]
    if e == AWAY.stop:
      values[1], steps[1] = np.concatenate([o.center for o in oracles]), 0
    for k in here:
      for i, delta in enumerate(deltas[k][e]):
        values[k] += delta
        if i + 1 == overlap_steps and e and not (k and e == AWAY.stop):
          merge(k, e - 1)
        seen[k][e, i] = values[k]
      steps[k] += len(deltas[k][e])
    p = e % len(ends)
    oracles[p].end_round([values[k][fragments[p]] for k in here],
                         steps[here, p])
    steps[here, p] = 0
    for k in here:
      if not overlap_steps:
        merge(k, e)
        seen[k][e, -1] = values[k]
  return seen


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("fragments, overlap_steps, local_weight", [
    (1, 1, 0.5), (2, 1, 0.0), (3, 0, 0.25), (3, 1, 0.5)])
def test_fragments_and_overlap(
    fragments, overlap_steps, local_weight, traced):
  """A worker leaves while its values travel, and comes back."""
  servers = [server_module.start().target for _ in range(2)]
  deltas = [np.random.default_rng(k).normal(
      size=(ROUNDS * fragments, 2 + k, 14)).astype(np.float32)
            for k in range(2)]
  is_settled, is_back = threading.Event(), threading.Event()

  def worker(k):

    def start():
      w = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
      local = wrapopt.DiLoCo(
          w, servers, f"w{k}", 2, (2 + k) * fragments, round_timeout_secs=60,
          local_weight=local_weight, fragments=fragments,
          overlap_steps=overlap_steps, resume=True)

      def step(x):
        for v, d in zip(w, tf.split(x, [3, 4, 1, 6])):
          v.assign_add(tf.reshape(d, v.shape))
        local.step()

      return w, local, tf.function(step) if traced else step

    w, local, step = start()
    seen = np.zeros(deltas[k].shape)
    for e, of_exchange in enumerate(deltas[k]):
      if k and e == AWAY.start:
        local.leave()
        assert local.report.counted and local.round == e
      if k and e in AWAY:
        continue
      if e == AWAY.stop:
        if k:
          is_settled.wait(60)
          w, local, step = start()
          is_back.set()
        else:
          local._exchanges.wait()
          is_settled.set()
          is_back.wait(60)
      for i, x in enumerate(of_exchange):
        step(tf.constant(x))
        seen[e, i] = np.concatenate([np.ravel(v) for v in w])
    local._exchanges.wait()
    assert local.round == len(deltas[k])
    return seen, [f.member.center for f in local._exchanges.fragments]

  (one, center), (other, of_other) = run_all(
      *[lambda k=k: worker(k) for k in range(2)])
  want = streaming(deltas, ENDS[fragments], overlap_steps, local_weight)
  for got, right in zip((one, other), want):
    np.testing.assert_allclose(got, right, rtol=0, atol=1e-4)
  for a, b in zip(center, of_other):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("rule, num_servers", [("DiLoCo", 3), ("LocalSGD", 1)])
@pytest.mark.parametrize("dtype", codes.DTYPES)
def test_codes_to_the_bit(dtype, rule, num_servers):
  """Of three workers, one leaves and comes back, and one misses a round."""
  servers = [server_module.start().target for _ in range(num_servers)]
  rng = np.random.default_rng(1)
  initial = rng.normal(size=500).astype(np.float32)
  oracle = CodedOracle(initial, dtype, num_servers, *(
      [] if rule == "DiLoCo" else [1, 0]))
  weights = {f"w{k}": 1 + 2 * k for k in range(3)}
  variables = {name: [tf.Variable(initial[:7]), tf.Variable(initial[7:])]
               for name in weights}
  locals_ = {
      name: getattr(wrapopt, rule)(
          variables[name], servers, name, 3, 1, min_workers=2, dtype=dtype,
          weight="examples", round_timeout_secs=3) for name in weights}
  member_of = lambda name: locals_[name]._exchanges.fragments[0].member
  flat = lambda name: np.concatenate([v.numpy() for v in variables[name]])

  def train(name):
    delta = rng.normal(size=500).astype(np.float32)
    variables[name][0].assign_add(delta[:7])
    variables[name][1].assign_add(delta[7:])
    return flat(name)

  holds = {*weights}  # Those that hold the center of the last round.
  for r in range(ROUNDS):
    members = [*weights]
    if 5 <= r < 9 or r == 12:
      members.remove("w2")
    if r == 5:
      locals_["w2"].leave()
    elif r == 9:
      locals_["w2"].take_center()
      holds.add("w2")
    elif r == 13:  # It has missed a round, so what it has trained is lost.
      train("w2")
      locals_["w2"].step(1)
      assert not locals_["w2"].report.counted
      assert locals_["w2"].report.sent == 0
      assert locals_["w2"].report.received == oracle.bytes
      holds.add("w2")
    values = {name: train(name) for name in members}
    run_all(*[lambda name=name: locals_[name].step(weights[name])
              for name in members])
    # The servers' vectors, in full.
    got = [member_of("w0").read(what)[1][0]
           for what in ("center", "velocities", "errors")]
    oracle.end_round(values, weights, got)
    for name in members:
      local = locals_[name]
      assert local.round == r + 1 and local.report.counted
      assert flat(name).tobytes() == oracle.center.tobytes()
      assert member_of(name).center[0].tobytes() == oracle.center.tobytes()
      assert local.report.workers == tuple(members)
      assert local.report.sent == oracle.bytes
      assert local.report.received == (oracle.bytes if name in holds else 2000)
    holds = {*members}
    for name, local in locals_.items():
      if oracle.errors[name].any():
        [error] = member_of(name).errors
        np.testing.assert_array_equal(error, oracle.errors[name])
  assert oracle.bytes < {"bfloat16": 1001, "int8": 540, "int4": 300}[dtype]
  # What is held back is less than a step of the codes.
  assert 0 < abs(oracle.lost).max() < {
      "bfloat16": .1, "int8": .2, "int4": 3}[dtype]
