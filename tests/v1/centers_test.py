"""Packing of variables, and the variables of workers' optimizers."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import modes
import wrapopt
from training import ancestors
from training import assert_same_bits
from training import kind  # pylint: disable=unused-import
from training import reads_of
from training import session_of
from wrapopt._v1._graphs import _control_flow
from wrapopt._v1._workers import _centers

tf1 = tf.compat.v1
A, B, C = (f"/device:CPU:{i}" for i in range(3))


def session():
  """One with three devices, in which nothing is rewritten."""
  return session_of(device_count={"CPU": 3})


def variable(value, device=A, dtype=tf.float32, **kwargs):
  with tf.device(device):
    return tf1.Variable(tf.constant(value, dtype), trainable=False, **kwargs)


def of_shape(shape, dtype=tf.float32, device=A):
  with tf.device(device):
    return tf1.get_variable(f"v{len(tf1.global_variables())}", shape, dtype,
                            tf1.zeros_initializer())


def test_buckets_by_dtype_and_device(kind):
  variables = [of_shape([2]), of_shape([], tf.float16), of_shape([0]),
               of_shape([3], tf.float32, B), of_shape([2], tf.float16)]
  assert _centers.buckets(variables) == [[0, 2], [1, 4], [3]]
  assert _centers.buckets([]) == []


def test_buckets_of_two_places(kind):
  """The workers' are on one device, the centers on two."""
  workers = [of_shape([2]) for _ in range(4)]
  centers = [of_shape([2], device=d) for d in (B, C, B, C)]
  assert _centers.buckets(workers, centers) == [[0, 2], [1, 3]]
  with pytest.raises(ValueError, match="longer|shorter"):
    _centers.buckets(workers, centers[:2])


def test_how_much_a_bucket_holds(kind):
  part = _centers._MOST_BYTES // 4 // 256  # Numbers in a 256th of that.
  sizes = [100, 100, 56, 1, 300, 0, 2, 256, 1, 254]
  groups = _centers.buckets([of_shape([s, part]) for s in sizes])
  assert groups == [[0, 1, 2], [3], [4], [5, 6], [7], [8, 9]]
  # Bytes, not numbers.
  assert _centers.buckets([of_shape([200, part], tf.float16)
                           for _ in range(3)]) == [[0, 1], [2]]


def test_an_unknown_shape(kind):
  v = tf1.Variable(tf1.placeholder(tf.float32, [None, 2]), name="v",
                   validate_shape=False)
  with pytest.raises(ValueError, match=r"The shape of 'v:0' must be known .* "
                     r"got (\(None, 2\)|<unknown>)"):
    _centers.pack([v])


VALUES = [np.float32([[1, 2], [3, 4]]), np.float32(5), np.float16([6, 7]),
          np.float32([[]]), np.float64([8]), np.float16([])]


def values(kind_of="all"):
  return {"all": VALUES, "one": VALUES[:1], "scalar": VALUES[1:2],
          "empty": [VALUES[3], VALUES[3]], "one empty": VALUES[3:4],
          "none": []}[kind_of]


@pytest.mark.parametrize("which", ["all", "one", "scalar", "empty",
                                   "one empty", "none"])
@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize("branch", [True, False])
def test_there_and_back(kind, which, v2, branch):
  """What is packed on one device is assigned on others."""
  sources = [variable(x, dtype=x.dtype) for x in values(which)]
  targets = [variable(np.zeros_like(x), (B, C)[i % 2], x.dtype)
             for i, x in enumerate(values(which))]
  with modes.control_flow(v2):
    copy = lambda: _centers.copy_packed(sources, targets)
    if branch:
      copy = _control_flow.cond(tf1.placeholder_with_default(True, []), copy,
                                kind == "ref")
    else:
      copy = copy()
  with session() as s:
    s.run(copy)
    assert_same_bits(s.run(targets), values(which))
    assert_same_bits(s.run(sources), values(which))


def test_of_one_place(kind):
  sources = [variable(x, dtype=x.dtype) for x in VALUES]
  targets = [variable(np.zeros_like(x), dtype=x.dtype) for x in VALUES]
  flats = _centers.pack(sources)
  assert [f.shape.as_list() for f in flats] == [[5], [2], [1]]
  copy = _centers.assign_packed(targets, flats)
  with session() as s:
    s.run(copy)
    assert_same_bits(s.run(targets), VALUES)


def test_as_many_tensors_as_groups(kind):
  v = variable([1.0])
  with pytest.raises(ValueError, match="longer|shorter"):
    _centers.assign_packed([v], [])


@pytest.mark.parametrize("count", [1, 2])
def test_reads_what_the_caller_waits_for(kind, count):
  variables = [variable([1.0]) for _ in range(count)]
  # A conversion of a ref variable reads it when it is made.
  _ = [tf.convert_to_tensor(v) for v in variables]
  updates = [v.assign_add([1.0], read_value=False) for v in variables]
  with tf.control_dependencies(updates):
    [flat] = _centers.pack(variables)
  [read] = reads_of(variables, ancestors(flat))
  assert set(updates) <= ancestors(read)
  with session() as s:
    for _ in range(20):
      s.run([v.initializer for v in variables])
      assert_same_bits([s.run(flat)], [np.float32([2.0] * count)])


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_packed_does_not_change(kind, count):
  variables = [variable(np.ones(1000)) for _ in range(count)]
  [flat] = _centers.pack(variables)
  with tf.control_dependencies([flat]):
    updates = [v.assign_add(np.ones(1000), read_value=False) for v in variables]
  with tf.control_dependencies(updates):
    after = tf.identity(flat)
  with session() as s:
    assert_same_bits([s.run(after)], [np.ones(1000 * count, np.float32)])
    assert s.run(variables[0])[0] == 2


def transfers(run):
  """[(from, to)] of each tensor that crosses between devices in a run."""
  metadata = tf1.RunMetadata()
  run(tf1.RunOptions(output_partition_graphs=True), metadata)
  nodes = {n.name: n for g in metadata.partition_graphs for n in g.node}
  # For a control edge, a constant is sent.
  return [tuple(n.attr[a].s.decode()[-len(A):]
                for a in ("send_device", "recv_device"))
          for n in nodes.values() if n.op in ("_Send", "_HostSend")
          and nodes[n.input[0].split(":")[0]].op != "Const"]


@pytest.mark.by_day(1)
def test_few_transfers(kind):
  """Packed where they come from, and split where they go."""
  sources = [variable([float(i), i + 0.5]) for i in range(100)]
  targets = [variable([0.0, 0.0], (B, C)[i % 2]) for i in range(100)]
  with tf.device(C):  # Nothing that should matter.
    copy = _centers.copy_packed(sources, targets)
  with session() as s:
    crossed = transfers(lambda options, metadata: s.run(
        copy, options=options, run_metadata=metadata))
    assert sorted(crossed) == [(A, B), (A, C)]
    assert_same_bits(s.run(targets), s.run(sources))


# Whose variables


class Beside(tf1.train.GradientDescentOptimizer):
  """Makes a variable wherever the caller is."""

  def _create_slots(self, var_list):
    super()._create_slots(var_list)
    self.made = self.make()

  def make(self):
    return tf1.get_variable("beside", [], trainable=False)


class BesideOfVersion2(Beside):

  def make(self):
    return tf.Variable(0.0, trainable=False)


class BesideInBoth(Beside):

  def make(self):
    return tf1.Variable(0.0, trainable=False, collections=[
        tf1.GraphKeys.LOCAL_VARIABLES, tf1.GraphKeys.GLOBAL_VARIABLES])


OPTIMIZERS = {
    "Adam": lambda: tf1.train.AdamOptimizer(0.5),
    "Momentum": lambda: tf1.train.MomentumOptimizer(0.5, 0.5),
    "Beside": lambda: Beside(0.5),
    "BesideOfVersion2": lambda: BesideOfVersion2(0.5),
    "BesideInBoth": lambda: BesideInBoth(0.5),
    "MovingAverage": lambda: wrapopt.MovingAverageOptimizer(
        tf1.train.AdamOptimizer(0.5)),
}


@pytest.mark.parametrize("in_scope", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_is_the_workers(kind, name, in_scope):
  worker = "/job:worker/task:1"
  getter = wrapopt.ModelAverageCustomGetter(worker)
  with tf1.device(tf1.train.replica_device_setter(
      cluster={"ps": ["ps:1"], "worker": ["w0:1", "w1:1"]})):
    with tf1.variable_scope("model", custom_getter=getter):
      v = tf1.get_variable("v", [2])
    with (tf1.variable_scope("model", custom_getter=getter) if in_scope
          else contextlib.nullcontext()):
      opt = OPTIMIZERS[name]()
      before = tf1.local_variables()
      with _centers.worker_state(worker):
        opt.minimize(tf.reduce_sum(v))
        step = tf1.train.get_or_create_global_step()
    after = tf1.get_variable("after", [2])
  assert [v.op.name for v in tf1.global_variables()] == [
      "global_center_variable/model/v", step.op.name, "after"]
  new = tf1.local_variables()[len(before):]
  assert len(new) == {"Adam": 4, "Momentum": 1, "MovingAverage": 5}.get(name, 1)
  assert {v.device for v in new} == {worker}
  assert step.device == after.device == "/job:ps/task:0"
  known = {v.ref() for v in new}
  made = [opt.made] if hasattr(opt, "made") else opt.variables()
  assert known == {v.ref() for v in made}
