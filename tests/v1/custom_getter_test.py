"""Local variables of workers and their centers."""

import contextlib
import functools

import numpy as np
import pytest
import tensorflow as tf

import modes
import wrapopt
from training import assert_same_bits
from training import graph_of
from training import kind  # pylint: disable=unused-import

tf1 = tf.compat.v1
GLOBAL = tf1.GraphKeys.GLOBAL_VARIABLES
LOCAL = tf1.GraphKeys.LOCAL_VARIABLES
TRAINABLE = tf1.GraphKeys.TRAINABLE_VARIABLES
MODEL = tf1.GraphKeys.MODEL_VARIABLES
WORKER = "/job:worker/task:1"


def model_average(device=WORKER):
  """A getter, and its maps by the prefix of the names that they hold."""
  getter = wrapopt.ModelAverageCustomGetter(device)
  return getter, {"global_center_variable/": getter._local_2_global}


def elastic_average(device=WORKER):
  getter = wrapopt.ElasticAverageCustomGetter(device)
  return getter, {"global_center_variable/": getter._global_map,
                  "local_center_variable/": getter._local_map}


@pytest.fixture(params=[model_average, elastic_average],
                ids=lambda f: f.__name__)
def make(request):
  """A function of the worker's device: a getter and its maps by prefix."""
  return request.param


def on_cluster():
  return tf1.device(tf1.train.replica_device_setter(
      cluster={"ps": ["ps0:1", "ps1:1"], "worker": ["w0:1", "w1:1"]},
      worker_device=WORKER))


@contextlib.contextmanager
def scope(getter, name="model", **kwargs):
  with tf1.variable_scope(name, custom_getter=getter, **kwargs) as s:
    yield s


def one_variable(make, *args, **kwargs):
  """(variable, its getter, the getter's maps)."""
  getter, maps = make("/cpu:0")
  with scope(getter):
    return tf1.get_variable("v", *args, **kwargs), getter, maps


@contextlib.contextmanager
def initialized():
  """A session after one run of all initializers."""
  with tf1.Session() as session:
    session.run([tf1.global_variables_initializer(),
                 tf1.local_variables_initializer()])
    yield session


def names(collection):
  return [v.op.name for v in tf1.get_collection(collection)]


def job(variable):
  return variable.device.split("/")[1]


def test_names_collections_and_devices(make, kind):
  getter, maps = make()
  with on_cluster(), scope(getter), tf.name_scope("leaks"):
    with tf1.variable_scope("layer"):
      w = tf1.get_variable("w", [2, 3], tf.float16)
    b = tf1.get_variable("b", [3])
  variables = {"model/layer/w": w, "model/b": b}
  copies = {prefix + name: maps[prefix][v] for prefix in maps
            for name, v in variables.items()}
  for name, v in {**variables, **copies}.items():
    assert v.op.name == name
  for v in variables.values():
    assert v.device == WORKER
    for m in maps.values():
      assert m[v].shape == v.shape and m[v].dtype == v.dtype
      assert hasattr(m[v], "handle") == hasattr(v, "handle")
      assert hasattr(v, "handle") == (kind == "resource")
      assert not m[v].trainable and v.trainable
  for name, v in copies.items():
    assert job(v) == ("job:ps" if name.startswith("global") else "job:worker")
  # Each on the next parameter server: the worker's own take no turns.
  assert [maps["global_center_variable/"][v].device for v in (w, b)] == [
      "/job:ps/task:0", "/job:ps/task:1"]
  assert names(TRAINABLE) == list(variables)
  assert sorted(names(GLOBAL)) == sorted(
      n for n in copies if n.startswith("global"))
  assert sorted(names(LOCAL)) == sorted(
      [*variables, *(n for n in copies if n.startswith("local"))])


def test_other_collections_of_the_caller_are_kept(make, kind):
  getter, maps = make()
  with scope(getter):
    tf1.get_variable("v", [2], collections=(GLOBAL, MODEL, "mine"))
    tf1.get_variable("w", [2], collections=[LOCAL, "mine"])
  assert names(MODEL) == ["model/v"]
  assert names("mine") == names(TRAINABLE) == ["model/v", "model/w"]
  assert names(GLOBAL) == ["global_center_variable/model/v",
                           "global_center_variable/model/w"]
  assert len(names(LOCAL)) == len(set(names(LOCAL))) == 2 * len(maps)


INITIALIZERS = {
    "none": {"shape": [2, 3]},
    "random": {"shape": [2, 3], "initializer": tf1.random_normal_initializer()},
    "class": {"shape": [2, 3], "initializer": tf1.ones_initializer},
    "number": {"initializer": 1.5},
    "array": {"initializer": np.float64([[1.0, 2.0]]), "dtype": tf.float64},
    "tensor": {"initializer": lambda: tf.random.normal([3])},
    "scalar": {"shape": [], "initializer": tf1.constant_initializer(7.0)},
    "empty": {"shape": [0, 3]},
    "integer": {"shape": [2], "dtype": tf.int32},
}


@pytest.mark.parametrize("case", INITIALIZERS)
def test_one_run_of_initializers_gives_equal_values(make, kind, case):
  v, _, maps = one_variable(make, **INITIALIZERS[case])
  copies = [m[v] for m in maps.values()]
  with initialized() as session:
    value, *others = session.run([v, *copies])
    for other in others:
      assert_same_bits([other], [value])
    assert value.shape == v.shape and value.dtype == v.dtype.base_dtype
    if case in ("none", "random", "tensor"):
      session.run(v.initializer)
      assert (session.run(v) != value).any()


@pytest.mark.parametrize("case", INITIALIZERS)
def test_the_center_needs_no_variable_of_the_worker(make, kind, case):
  v, _, maps = one_variable(make, **INITIALIZERS[case])
  with tf1.Session() as session:
    session.run(tf1.global_variables_initializer())
    session.run(maps["global_center_variable/"][v])
    # An empty ref variable always has its value.
    assert session.run(tf1.is_variable_initialized(v)) == (
        kind == "ref" and case == "empty")


def test_an_initial_value_from_another_variable(make):
  """While the other has none, TensorFlow puts its initial value there.

  It does so for ref variables, and in control flow version 1.
  """
  with graph_of("ref"), modes.control_flow(v2=False):
    getter, maps = make("/cpu:0")
    with scope(getter):
      a = tf1.get_variable("a", initializer=[1.0, 2.0])
      b = tf1.get_variable("b", initializer=2 * a)
    with tf1.Session() as session:
      session.run(tf1.global_variables_initializer())
      center = maps["global_center_variable/"][b]
      assert_same_bits([session.run(center)], [np.float32([2, 4])])
      assert not session.run(tf1.is_variable_initialized(a))


@pytest.mark.parametrize("reuse", [True, tf1.AUTO_REUSE])
def test_reuse(make, kind, reuse):
  v, getter, maps = one_variable(make, [2])
  first = {prefix: m[v] for prefix, m in maps.items()}
  before = len(tf1.get_default_graph().get_operations())
  with scope(getter, reuse=reuse):
    again = tf1.get_variable("v", [2])
  assert again is v
  assert all(maps[prefix][v] is copy for prefix, copy in first.items())
  assert len(tf1.get_default_graph().get_operations()) == before
  assert len(tf1.global_variables()) == 1


@pytest.mark.parametrize("reuse", [True, tf1.AUTO_REUSE])
def test_another_getter_finds_the_same_copies(make, kind, reuse):
  (one, ones), (two, twos) = make(), make()
  with scope(one):
    v = tf1.get_variable("v", [2])
  with scope(two, reuse=reuse):
    assert tf1.get_variable("v", [2]) is v
  for prefix, copies in ones.items():
    assert twos[prefix][v] is copies[v]


def test_a_getter_inside_itself(make, kind):
  getter, maps = make()
  with scope(getter), scope(getter, "inner"):
    v = tf1.get_variable("v", [2])
  assert all(list(m) == [v] for m in maps.values())
  assert names(GLOBAL) == ["global_center_variable/model/inner/v"]


def test_without_reuse_a_name_is_taken(make, kind):
  getter, _ = make()
  with scope(getter):
    tf1.get_variable("v", [2])
    with pytest.raises(ValueError, match="model/v already exists"):
      tf1.get_variable("v", [2])
  with scope(getter, reuse=True):
    with pytest.raises(ValueError, match="model/w does not exist"):
      tf1.get_variable("w", [2])


@pytest.mark.parametrize("initializer", [
    tf1.random_normal_initializer(), None], ids=["random", "tensor"])
def test_partitioned(make, kind, initializer, tmp_path):
  getter, maps = make("/cpu:0")
  if initializer is None:
    initializer = tf.random.normal([5, 2])
  # TensorFlow takes no other value of a partitioned variable than a tensor.
  shape = [5, 2] if callable(initializer) else None
  for reuse in False, True, tf1.AUTO_REUSE:
    with scope(getter, reuse=reuse, partitioner=tf1.fixed_size_partitioner(3)):
      v = tf1.get_variable("v", shape, initializer=initializer)
  assert [s.op.name for s in v] == [f"model/v/part_{i}" for i in range(3)]
  for prefix, m in maps.items():
    assert [m[s].op.name for s in v] == [
        f"{prefix}model/v/part_{i}" for i in range(3)]
    assert len(m) == 3
  with initialized() as session:
    want = session.run(list(v))
    assert [x.shape for x in want] == [(2, 2), (2, 2), (1, 2)]
    for m in maps.values():
      assert_same_bits(session.run([m[s] for s in v]), want)
    path = tf1.train.Saver().save(session, str(tmp_path / "model"))
  # One tensor, of all slices.
  assert tf.train.list_variables(path) == [
      ("global_center_variable/model/v", [5, 2])]
  assert_same_bits(
      [tf.train.load_variable(path, "global_center_variable/model/v")],
      [np.concatenate(want)])


@pytest.mark.parametrize("collections, expected", [
    (None, "job:ps"), ([GLOBAL], "job:ps"), (["mine"], "job:ps"),
    ([LOCAL], "job:worker"), ((LOCAL, "mine"), "job:worker")])
def test_what_is_not_trained(make, kind, collections, expected):
  getter, maps = make()
  with on_cluster(), scope(getter):
    v = tf1.get_variable("v", [2], trainable=False, collections=collections)
  assert job(v) == expected
  assert not v.trainable and not any(maps.values())
  for collection in collections or [GLOBAL]:
    assert names(collection) == ["model/v"]
  assert len(tf1.global_variables() + tf1.local_variables()) == (
      0 if collections == ["mine"] else 1)


def test_summed_on_read_is_not_trained(make, kind):
  getter, maps = make()
  with scope(getter):
    tf1.get_variable("v", [2],
                     synchronization=tf.VariableSynchronization.ON_READ,
                     aggregation=tf.VariableAggregation.SUM)
    w = tf1.get_variable("w", [2], aggregation=tf.VariableAggregation.MEAN)
  assert all(list(m) == [w] for m in maps.values())
  assert all(m[w].aggregation == tf.VariableAggregation.MEAN
             for m in maps.values())


# As `getter` of a scope's store has its arguments.
def positional(getter, name, shape, dtype, initializer, regularizer, reuse,
               trainable, collections, **kwargs):
  return getter(name, shape, dtype, initializer, regularizer, reuse, trainable,
                collections, **kwargs)


@pytest.mark.parametrize("trainable", [True, False])
def test_positional_arguments(make, kind, trainable):
  getter, maps = make()
  with scope(getter), scope(positional, "inner"):
    v = tf1.get_variable("v", [2], tf.float64, trainable=trainable,
                         collections=["mine"])
  assert v.dtype.base_dtype == tf.float64 and names("mine") == [v.op.name]
  assert all((v in m) == trainable for m in maps.values())


def test_trainable_may_be_unknown(make, kind):
  getter, maps = make()
  unknown = lambda getter, name, trainable, **kwargs: getter(
      name, trainable=None, **kwargs)
  with scope(getter), scope(unknown, "inner"):
    v = tf1.get_variable("v", [2])
  assert all(list(m) == [v] for m in maps.values())


def test_the_copies_are_not_regularized_nor_constrained(make, kind):
  getter, maps = make()
  with scope(getter, regularizer=tf.nn.l2_loss,
             constraint=lambda x: tf.maximum(x, 0)):
    v = tf1.get_variable("v", [2])
  assert len(tf1.losses.get_regularization_losses()) == 1
  assert v.constraint is not None
  assert all(m[v].constraint is None for m in maps.values())


def test_an_unknown_shape(make, kind):
  v, _, maps = one_variable(
      make, initializer=lambda: tf1.placeholder_with_default(
          tf.constant([1.0, 2.0]), [None]), validate_shape=False)
  assert not v.shape.is_fully_defined()
  with initialized() as session:
    for m in maps.values():
      assert_same_bits([session.run(m[v])], [np.float32([1, 2])])


def test_maps(make, kind):
  v, _, maps = one_variable(make, [2])
  other = tf1.get_variable("other", [2])
  for m in maps.values():
    assert v in m and other not in m and "v" not in m and len(m) == 1
    assert list(m.items()) == [(v, m[v])] and m.get(other) is None
    with pytest.raises(KeyError,
                       match="'other:0' must be a variable that the cu"):
      m[other]
    del m[v]
    assert v not in m and not m


def test_in_eager_mode(make):
  getter, _ = make()
  for run in (lambda f: f(), lambda f: tf.function(f)()):
    with pytest.raises(RuntimeError, match="must be used in a tf.Graph"):
      with scope(getter):
        run(functools.partial(tf1.get_variable, "v", [2]))


def test_in_a_strategy(make):
  getter, _ = make()
  with tf.Graph().as_default():
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope(), scope(getter):
      with pytest.raises(NotImplementedError, match="tf.distribute strategy"):
        tf1.get_variable("v", [2])


def test_no_device(make):
  with pytest.raises(ValueError, match="worker 1"):
    make("worker 1")


def test_slots_may_be_made_in_the_scope(make, kind):
  """In 1.15 their collections, which are None, were an error."""
  getter, maps = make("/cpu:0")
  with scope(getter):
    v = tf1.get_variable("v", initializer=[1.0])
    opt = tf1.train.AdamOptimizer(0.5)
    train = opt.minimize(tf.reduce_sum(v))
  assert all(list(m) == [v] for m in maps.values())
  with initialized() as session:
    session.run(train)
    np.testing.assert_allclose(session.run(v), [0.5], rtol=1e-6)
