"""Keras's own tests of its optimizers, with each optimizer in a wrapper.

They are part of Keras's wheel. In a copy of a test module, the names of the
optimizers make wrapped ones. The wrappers' settings do not change the
variables' numbers, so Keras's expectations hold.
"""

import contextlib
import importlib
import importlib.util
import inspect
import pkgutil
import unittest
from unittest import mock

import keras
from keras.src import optimizers
import pytest

import wrapopt.keras as wk

MODULES = sorted(
    m.name for m in pkgutil.iter_modules(optimizers.__path__)
    if m.name.endswith("_test"))
pytestmark = pytest.mark.skipif(
    not MODULES, reason=f"Keras {keras.__version__} came without its tests")

WRAPPERS = {
    "MovingAverage": lambda opt: wk.MovingAverage(opt, 0.5),
    "SWA": lambda opt: wk.SWA(opt, 0, 1),
    "Lookahead": lambda opt: wk.Lookahead(opt, 1_000_000),
}

CLASSES = {x for x in vars(keras.optimizers).values()
           if inspect.isclass(x) and issubclass(x, keras.optimizers.Optimizer)
           } - {keras.optimizers.Optimizer}
HOLDERS = {x for x in CLASSES
           if x.__name__ in ("LossScaleOptimizer", "MultiOptimizer")}

_NAME = "compares the name of the class, or a name or a config made from it"
_ENDS = "reads weights after fit(), which ends with our averages in them"
_PARTS = ("calls a part of a step by itself, which a wrapper leaves to the "
          "optimizer inside")
_PATCHED = ("watches assign() of the optimizer that it was given, and of all "
            "variables: steps are the inner optimizer's, or a native op's, "
            "and averages are set before the first one. "
            "test_sparse_correctness has the numbers")
_TWICE = "would be a wrapper in a wrapper of its own class"

# {(module, test): (the wrappers or the places where it must fail, why)}.
# A test fails if one of these passes.
_ALL = tuple(WRAPPERS)
_AVERAGES = ("MovingAverage", "SWA")
LEFT_OUT = {
    ("adam_test", "test_ema"): (_AVERAGES, _ENDS),
    ("loss_scale_optimizer_test", "test_serialization"): (("around",), _NAME),
    ("multi_optimizer_test", "test_multi_optimizer_blocks_nested_optimizers"): (
        ("around",), "Keras refuses a class, which is not that of a wrapper"),
    # At the only step, the mean of SWA is what the weights are.
    ("multi_optimizer_test", "test_multi_optimizer_with_model_fit"): (
        ("MovingAverage",), _ENDS),
    ("multi_optimizer_test",
     "test_multi_optimizer_wrapped_in_loss_scale_optimizer"): (
         ("around",), _TWICE),
    ("multi_optimizer_test", "test_serialization"): (("inside",), _NAME),
    ("multi_optimizer_test", "test_tensorboard_logging_with_multi_optimizer"): (
        ("inside",), _NAME),
    ("muon_test", "test_adamw_single_step"): (_ALL, _PARTS),
    ("muon_test", "test_adamw_weight_decay"): (_ALL, _PARTS),
    ("muon_test", "test_muon_single_step"): (_ALL, _PARTS),
    ("optimizer_test", "test_ema_with_model_fit"): (_AVERAGES, _ENDS),
    ("optimizer_test", "test_optimizer_auto_naming"): (_ALL, _NAME),
    **{("optimizer_sparse_test", f"test_sparse_gradients_{name}"): (
        _ALL, _PATCHED) for name in (
            "adadelta", "adafactor", "adagrad", "adam", "adam_amsgrad",
            "adamax", "adamw", "adamw_amsgrad", "ftrl", "lion",
            "loss_scale_optimizer_sgd", "nadam", "rmsprop",
            "rmsprop_momentum", "rmsprop_momentum_centered", "sgd",
            "sgd_momentum", "sgd_momentum_nesterov")},
}


def _read_inside(self, name):
  """Keras's tests read attributes of an optimizer: they are the inner one's."""
  if name.startswith("__") or "_inside" not in vars(self):
    raise AttributeError(name)
  return getattr(self.inner_optimizer, name)


_MADE = []  # (class, wrapper) of what the current module has made.


class _Wrapped(type):
  """A class of optimizers whose objects are made in a wrapper."""

  def __call__(cls, *args, **kwargs):
    made = cls.wrap(cls.stock(*args, **kwargs))
    _MADE.append((cls.stock, made))
    return made

  def __instancecheck__(cls, x):
    return isinstance(x, cls.stock) or (
        isinstance(x, wk._wrapper.WrapperOptimizer) and
        isinstance(x.inner_optimizer, cls.stock))

  def __getattr__(cls, name):
    return getattr(cls.stock, name)


class _Namespace:
  """`keras.src.optimizers` with wrapped classes."""

  def __init__(self, wrapped, wrap):
    self._wrapped, self._wrap = wrapped, wrap

  def __getattr__(self, name):
    return self._wrapped.get(name, getattr(optimizers, name))

  def get(self, identifier):
    found = optimizers.get(identifier)
    return (self._wrap(found) if type(found).__name__ in self._wrapped
            else found)


def cases_of(name, wrapper, classes):
  """The tests of a module of Keras's, in which `classes` are wrapped."""
  wrap = WRAPPERS[wrapper]
  wrapped = {cls.__name__: _Wrapped(cls.__name__, (), {
      "stock": cls, "wrap": staticmethod(wrap)}) for cls in classes}
  spec = importlib.util.find_spec(f"{optimizers.__name__}.{name}")
  module = importlib.util.module_from_spec(spec)
  with contextlib.ExitStack() as patched:
    for cls in classes:
      patched.enter_context(mock.patch.object(
          importlib.import_module(cls.__module__), cls.__name__,
          wrapped[cls.__name__]))
    patched.enter_context(mock.patch.object(
        keras.src, "optimizers", _Namespace(wrapped, wrap)))
    spec.loader.exec_module(module)
  suites = unittest.defaultTestLoader.loadTestsFromModule(module)
  return [test for suite in suites for test in suite]


def run(test):
  """None if it passes or is skipped, else its traceback."""
  result = unittest.TestResult()
  with mock.patch.multiple(
      wk._wrapper.WrapperOptimizer, create=True, __getattr__=_read_inside,
      # Keras's tests count them.
      variables=property(lambda self: self.inner_optimizer.variables),
      # Keras's own averages, also inside a wrapper with others.
      _model_variables_moving_average=property(
          lambda self: self.inner_optimizer._model_variables_moving_average),
      use_ema=property(lambda self: "_inside" in vars(self) and
                       self.inner_optimizer.use_ema, lambda self, x: None)):
    test.run(result)
  assert result.testsRun == 1
  return next((text for _, text in result.failures + result.errors), None)


def module_of(cls):
  """The module that tests a class."""
  return cls.__module__.rpartition(".")[2] + "_test"


CASES = [(name, wrapper, "inside") for name in MODULES for wrapper in WRAPPERS
         ] + [(name, wrapper, "around") for wrapper in WRAPPERS for name in
              ("loss_scale_optimizer_test", "multi_optimizer_test")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, wrapper, where", CASES)
def test_module(name, wrapper, where):
  classes = HOLDERS if where == "around" else CLASSES - HOLDERS
  tests = cases_of(name, wrapper, classes)
  assert tests
  _MADE.clear()
  wrong = {}
  for test in tests:
    method = test.id().rpartition(".")[2]
    failed = run(test)
    places, why = LEFT_OUT.get((name, method), ((), ""))
    left_out = where in places or wrapper in places
    if failed and not left_out:
      wrong[method] = failed
    elif left_out and not failed:
      wrong[method] = f"passes, and is in LEFT_OUT: {why}"
  assert not wrong, "\n\n".join(f"{test}: {x}" for test, x in wrong.items())
  # The tests have used wrapped optimizers, those of the module's subject too.
  assert any(opt.built for _, opt in _MADE)
  assert {cls for cls in classes if module_of(cls) == name} <= {
      cls for cls, _ in _MADE}


def test_what_is_left_out_is_there():
  for name, method in LEFT_OUT:
    assert method in {test.id().rpartition(".")[2]
                      for test in cases_of(name, "SWA", set())}


def test_all_optimizers_and_wrappers_are_there():
  assert {module_of(cls) for cls in CLASSES} <= set(MODULES)
  found = [importlib.import_module(f"{optimizers.__name__}.{m.name}")
           for m in pkgutil.iter_modules(optimizers.__path__)
           if not m.name.endswith("_test")]
  defined = {cls for module in found for cls in vars(module).values()
             if inspect.isclass(cls) and cls.__module__ == module.__name__
             and issubclass(cls, keras.optimizers.Optimizer)}
  assert defined - CLASSES == {keras.optimizers.Optimizer}
  # PrimalAverage and ScheduleFree train other points than the optimizer alone,
  # and a gate wants a record of each step.
  assert {*WRAPPERS, "DropStaleGradient", "PrimalAverage", "ScheduleFree"} == {
      name for name in wk.__all__ if inspect.isclass(getattr(wk, name))
      and issubclass(getattr(wk, name), wk._wrapper.WrapperOptimizer)}
