"""Methods that users set on an instance of an optimizer, or on its class.

Keras calls them. A wrapper calls them, too, or raises an error.
"""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from arrays import assert_same
import keras_versions
from training import in_mode
import wrapopt.keras as wk
from wrapopt.keras._steps import _methods

K = keras.optimizers

# All methods of Keras's optimizers: a new one is seen here.
METHODS = [
    name for name, method in inspect.getmembers(K.Optimizer, inspect.isfunction)
    if method.__module__.startswith("keras.") and not name.startswith("__")]

# Those that read or save state, or make variables, and take no part in a step.
APART = {
    "_obj_type", "add_optimizer_variables", "add_variable",
    "add_variable_from_reference", "build", "exclude_from_weight_decay",
    "finalize_variable_values", "get_config", "load_own_variables",
    "save_own_variables", "scale_loss", "set_weights", "stateless_apply",
    "_check_super_called", "_track_variable", "_untrack_variable"}

# Optimizers and options that together call all others.
INNER = {
    "SGD": lambda **kwargs: K.SGD(0.1, weight_decay=0.5, **kwargs),
    "Adamax": lambda **kwargs: K.Adamax(0.1, beta_1=0.0, weight_decay=0.5,
                                        **kwargs)}
OPTIONS = [
    {"use_ema": True, "ema_overwrite_frequency": 2},
    {"gradient_accumulation_steps": 2, "clipnorm": 0.5}]

WRAPPERS = {
    "MovingAverage": lambda o: wk.MovingAverage(o, 0.5),
    "SWA": wk.SWA,
    "Lookahead": wk.Lookahead,
    "PrimalAverage": wk.PrimalAverage,
    "ScheduleFree": wk.ScheduleFree,
    "two": lambda o: wk.MovingAverage(wk.Lookahead(o), 0.5),
}


def set_method(opt, name):
  """Sets a method that counts its calls, and then calls the class's."""
  calls, own = [], getattr(opt, name)

  def method(*args, **kwargs):
    calls.append(args)
    return own(*args, **kwargs)

  setattr(opt, name, method)
  return calls


def train(opt):
  v, w = keras.Variable([3.0, 1.0]), keras.Variable([2.0])
  for i in range(2):
    grads = [tf.constant([1.0, float(i)]), tf.constant([2.0])]
    opt.apply_gradients(zip(grads, [v, w]))
  return np.concatenate([v.numpy(), w.numpy()])


@pytest.mark.by_day(1)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("wrapper", ["MovingAverage", "PrimalAverage",
                                     "ScheduleFree"])
def test_each_method_of_the_inner_optimizer(inner, wrapper):
  """It is called as often as by Keras, or refused."""
  refused, called = set(), set()
  for options in OPTIONS[wrapper != "MovingAverage":]:
    for name in sorted(set(METHODS) - APART):
      plain = INNER[inner](**options)
      in_keras = set_method(plain, name)
      train(plain)
      opt = INNER[inner](**options)
      calls = set_method(opt, name)
      try:
        wrapped = WRAPPERS[wrapper](opt)
      except NotImplementedError as e:
        refused.add(name)
        assert f"got {name} of {inner}, which it would pass over. Make a " in (
            str(e)) and not calls
        continue
      train(wrapped)
      if in_keras:
        called.add(name)
        # We ask for some of them more often.
        assert len(calls) >= len(in_keras), name
  assert called and not refused & called
  # Adamax calls its `update_step`. A native op replaces that of SGD.
  assert ("update_step" in called) == (inner == "Adamax")
  assert refused >= {"apply", "apply_gradients", "_apply_weight_decay"}


def test_each_method_of_a_wrapper():
  """It is one of ours, or one that we call, or refused."""
  for name in METHODS:
    opt = wk.MovingAverage(K.SGD(0.1, weight_decay=0.5), 0.5)
    calls = set_method(opt, name)
    try:
      train(opt)
    except NotImplementedError as e:
      assert f"got {name} of MovingAverage" in str(e) and not calls
      assert opt.iterations == 0
    else:
      ours = any(name in vars(c) for c in type(opt).__mro__
                 if c.__module__.startswith("wrapopt."))
      assert ours or name in _methods._CALLED, name


def test_apply_of_a_wrapper_is_called_by_apply_gradients():
  opt = wk.MovingAverage(K.SGD(0.1), 0.5)
  expected = train(wk.MovingAverage(K.SGD(0.1), 0.5))
  calls = set_method(opt, "apply")
  np.testing.assert_array_equal(train(opt), expected)
  assert len(calls) == 2

  class Counting(wk.MovingAverage):

    def apply(self, *args, **kwargs):
      calls.append(args)
      return super().apply(*args, **kwargs)

  np.testing.assert_array_equal(train(Counting(K.SGD(0.1), 0.5)), expected)
  assert len(calls) == 4


def test_a_wrapper_inside():
  for name in ("apply", "apply_gradients", "update_step"):
    inner = wk.Lookahead(K.SGD(0.1))
    set_method(inner, name)
    with pytest.raises(NotImplementedError, match=(
        f"got {name} of Lookahead, which it would pass over. Override it in")):
      wk.MovingAverage(inner, 0.5)


@pytest.mark.parametrize("kind", keras_versions.cases(["loss_scale", "multi"]))
def test_an_optimizer_that_holds_others(kind):
  holder = (K.LossScaleOptimizer(K.SGD(0.1)) if kind == "loss_scale" else
            K.MultiOptimizer({".*": K.SGD(0.1)}))
  set_method(holder, "apply")
  with pytest.raises(NotImplementedError, match="got apply of "):
    wk.MovingAverage(holder, 0.5)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("mode", ["eager", "function", "jit", "fit"])
def test_set_after_some_steps(wrapper, mode):
  """An eager step and a trace refuse it. A step changes nothing then."""
  inner = K.SGD(0.1)
  opt = WRAPPERS[wrapper](inner)
  model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
  model.compile(opt, "mse", jit_compile=False)

  def take():
    if mode == "fit":
      model.fit(np.ones([4, 2]), np.ones([4, 1]), batch_size=2, verbose=0)
      return
    in_mode(lambda: opt.apply([tf.ones_like(v) for v in model.weights],
                              model.trainable_variables), mode)()

  take()
  set_method(inner, "update_step")
  before = model.get_weights()
  model.make_train_function(force=True)
  with pytest.raises(NotImplementedError, match="got update_step of SGD"):
    take()
  assert_same(before, model.get_weights())
  del inner.update_step
  take()


def test_a_method_of_a_class(monkeypatch):
  """A step calls the method that replaces one of Keras's class."""
  calls, own = [], K.SGD.update_step

  def update_step(self, *args, **kwargs):
    calls.append(args)
    return own(self, *args, **kwargs)

  expected = train(K.SGD(0.1))
  monkeypatch.setattr(K.SGD, "update_step", update_step)
  opt = wk.MovingAverage(K.SGD(0.1), 0.5)
  assert not opt.fused
  np.testing.assert_array_equal(train(opt), expected)
  assert len(calls) == 4
