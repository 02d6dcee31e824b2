"""Eager steps, which cache facts about their lists of variables."""

import copy
import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

import wrapopt
from wrapopt import _loader
from wrapopt import _lookup_cache
from wrapopt import ops
from wrapopt._v1._steps import _rules
from wrapopt.ops import _apply
from wrapopt.ops import _check
from wrapopt.ops import _variables

v1 = tf.compat.v1


def make(inner=None, decay=0.5):
  return wrapopt.MovingAverageOptimizer(
      inner or v1.train.MomentumOptimizer(1.0, 0.5), decay)


def variables_of(count=3):
  return [tf.Variable([1.0, 2.0]) for _ in range(count)]


def step(opt, variables, gradient=1.0):
  opt.apply_gradients([(gradient * tf.ones([2]), v) for v in variables])


def state(opt, v):
  """(value, velocity, average) of the first element."""
  return [float(x[0]) for x in (v, opt.get_slot(v, "momentum"), opt.average(v))]


# What a step does.


class Counter:
  """Counts calls of a function that it replaces."""

  def __init__(self, monkeypatch, owner, name):
    self.calls = 0
    called = getattr(owner, name)

    def counted(*args, **kwargs):
      self.calls += 1
      return called(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)


# Functions that an uncached step calls for each variable.
ASKED = [(_check, "dtype"), (_check, "shape"), (_check, "variable"),
         (_variables, "is_ref"), (ops, "is_ref_variable"),
         (_apply.Update, "_gradient_and_kind"),
         (_rules, "gradient"), (v1.train.Optimizer, "get_slot"),
         (v1.train.Optimizer, "_get_or_make_slot"),
         (wrapopt.MovingAverageOptimizer, "get_slot"),
         (tf, "convert_to_tensor")]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("inner", [
    lambda: v1.train.GradientDescentOptimizer(1.0),
    lambda: v1.train.MomentumOptimizer(1.0, 0.5), v1.train.AdamOptimizer])
def test_nothing_is_asked_of_each_variable_again(inner, monkeypatch):
  variables, opt = variables_of(50), make(inner())
  counters = [Counter(monkeypatch, *asked) for asked in ASKED]
  step(opt, variables)
  assert sum(c.calls for c in counters) > 5 * 50
  for c in counters:
    c.calls = 0
  step(opt, variables)
  assert sum(c.calls for c in counters) < 50


class _Executed:
  """The names of the ops that are executed eagerly inside, in order."""

  def __enter__(self):
    self.names = []

    def look_up(raw, name):
      if name.startswith("wrapopt_"):
        self.names.append(name)
      return object.__getattribute__(raw, name)

    _loader._Ops.__getattribute__ = look_up
    return self

  def __exit__(self, *_):
    del _loader._Ops.__getattribute__


def executed(call):
  with _Executed() as run:
    call()
  return run.names


def test_a_step_is_one_native_call():
  variables, opt = variables_of(20), make(decay=[0.5, 0.75])
  first, *others = [executed(lambda: step(opt, variables)) for _ in range(3)]
  assert first == ["wrapopt_bundle", "wrapopt_apply"]
  assert others == [["wrapopt_apply"]] * 2


def test_two_lists_that_take_turns():
  variables, opt = variables_of(4), make()
  for _ in range(2):
    step(opt, variables[:2])
    step(opt, variables[2:])
    step(opt, variables[::-1])
  # Velocities 1, 3/2, 7/4, 15/8 and their sum from 1.
  for v in variables:
    assert state(opt, v)[:2] == [1 - 6.125, 1.875]
  cache = _rules._caches[opt._optimizer]
  assert len(cache._facts) == 3


def test_many_lists_are_not_all_cached():
  opt, all_ = make(), variables_of(8)
  for i in range(1, 60):
    step(opt, [v for k, v in enumerate(all_) if i >> k & 1])
  assert len(opt._averages._cache._facts) == _lookup_cache._MOST
  assert len(opt._averages._cache._refs) == _lookup_cache._MOST
  before = state(opt, all_[0])
  step(opt, all_[:1])  # One that was forgotten.
  assert state(opt, all_[0])[1] == before[1] / 2 + 1


# What is seen.


def test_a_list_is_forgotten_with_a_variable():
  opt, variables = make(), variables_of()
  step(opt, variables)
  caches = opt._averages._cache, _rules._caches[opt._optimizer]
  assert [len(c._facts) for c in caches] == [1, 1]
  [cached] = [x for x in _rules._caches[opt._optimizer].get(
      variables).values() if isinstance(x, _rules._CachedUpdate)]
  gone = [weakref.ref(variables[0]), weakref.ref(opt.average(variables[0])),
          weakref.ref(cached.update)]
  del variables[0], cached
  gc.collect()
  assert [len(c._facts) + len(c._refs) for c in caches] == [0, 0]
  assert [ref() for ref in gone] == [None] * 3


def test_a_variable_in_the_place_of_another():
  # A new variable often gets the address of one that is deleted.
  opt, keep, addresses, n = make(), variables_of(1), set(), 0
  while len(addresses) == n < 100:
    v = tf.Variable([float(n), 0.0])
    addresses.add(id(v))
    step(opt, [keep[0], v])
    assert state(opt, v) == [n - 1, 1, n - 0.5]
    n += 1
    del v
    gc.collect()
  assert len(addresses) < n


def test_a_variable_of_another_shape():
  v = tf.Variable([1.0, 2.0], shape=tf.TensorShape(None))
  opt = wrapopt.MovingAverageOptimizer(
      v1.train.GradientDescentOptimizer(1.0), 0.5)
  opt.apply_gradients([(tf.ones([2]), v)])
  opt.apply_gradients([(tf.ones([2]), v)])
  v.assign([1.0, 2.0, 3.0])
  with pytest.raises(tf.errors.InvalidArgumentError, match="misshapen"):
    opt.apply_gradients([(tf.ones([3]), v)])
  np.testing.assert_array_equal(v, [1.0, 2.0, 3.0])
  v.assign([1.0, 2.0])
  opt.apply_gradients([(tf.ones([2]), v)])
  np.testing.assert_array_equal(v, [0.0, 1.0])


def test_slots_that_were_replaced():
  opt, variables = make(), variables_of()
  step(opt, variables)
  slots = opt._optimizer._slots["momentum"]
  key, old = next(iter(slots.items()))
  slots[key] = tf.Variable([8.0, 8.0])
  step(opt, variables)
  assert old.numpy()[0] == 1
  assert state(opt, variables[0])[1] == 5
  slots.clear()
  step(opt, variables)
  assert state(opt, variables[0])[1] == 1


def test_gradients_of_other_kinds():
  opt, variables = make(), variables_of()
  step(opt, variables)
  sparse = tf.IndexedSlices(tf.constant([1.0]), tf.constant([0]),
                            tf.constant([2]))
  opt.apply_gradients([(sparse, variables[0]), (np.float32([1, 1]),
                                                variables[1]),
                       (tf.ones([2]), variables[2])])
  for v in variables:
    assert state(opt, v)[:2] == [-1.5, 1.5]
  with pytest.raises(TypeError, match=(
      r"`grads\[1\]` must be of dtype float32, got float64")):
    opt.apply_gradients([(tf.ones([2], "float64" if i == 1 else "float32"), v)
                         for i, v in enumerate(variables)])
  with pytest.raises(tf.errors.InvalidArgumentError,
                     match=r"grad\[2\] misshapen"):
    opt.apply_gradients([(tf.ones([2 + i // 2]), v)
                         for i, v in enumerate(variables)])
  for v in variables:
    assert state(opt, v)[:2] == [-1.5, 1.5]


def test_a_variable_that_is_named_twice():
  opt, variables = make(), variables_of(2)
  step(opt, variables)
  opt.apply_gradients([(tf.ones([2]), v) for v in variables + variables[:1]])
  # Its average moves once.
  assert state(opt, variables[0]) == [-3.25, 1.75, -1.375]
  assert state(opt, variables[1])[1] == 1.5


def test_wrappers_that_share_an_optimizer():
  inner = v1.train.MomentumOptimizer(1.0, 0.5)
  one, two = make(inner), make(inner, [0.75, 0.875])
  [v] = variables_of(1)
  for _ in range(3):
    step(one, [v])
    step(two, [v])
  assert state(one, v)[1] == 1.96875
  # 1 -> 0 -> -1.5 -> ...: each average moves at the steps of its own wrapper.
  assert state(one, v)[2] != state(two, v)[2]


def test_a_copy_has_an_empty_cache():
  opt, variables = make(), variables_of()
  step(opt, variables)
  copied = copy.deepcopy(opt)
  assert not copied._averages._cache._facts
  step(copied, variables)
  step(opt, variables)
