"""All public functions have type annotations, for a user's type checker.

`./tools/types` checks that they are right.
"""

import inspect
import os

import pytest

import wrapopt
import wrapopt.checkpoints
import wrapopt.keras


def public():
  """Functions, and methods of classes that wrapopt defines: {name: it}."""
  found = {}
  for module in (wrapopt, wrapopt.checkpoints, wrapopt.keras, wrapopt.ops,
                 wrapopt.sysconfig):
    for name in module.__all__:
      thing = getattr(module, name)
      if inspect.isfunction(thing):
        found[f"{module.__name__}.{name}"] = thing
      if not inspect.isclass(thing):
        continue
      for base in thing.__mro__:
        # A private base class is no user's, but for public methods.
        if base is not thing and (
            not base.__module__.startswith("wrapopt") or
            "._" in base.__module__ and not base.__name__.endswith("Methods")):
          continue
        for method, function in vars(base).items():
          # A method of a class of TensorFlow or Keras has its types there.
          is_new = not any(method in vars(b) for b in thing.__mro__
                           if not b.__module__.startswith("wrapopt"))
          function = getattr(function, "fget", function)
          if inspect.isfunction(function) and (
              method == "__init__" or is_new and not method.startswith("_")):
            found[f"{base.__module__}.{base.__name__}.{method}"] = function
  return found


# Methods of the Keras wrappers for each other; no user calls them.
_INTERNAL = {"averaged", "averages", "begin", "follow", "is_lazy"}


@pytest.mark.parametrize("name", sorted(
    name for name in public() if name.split(".")[-1] not in _INTERNAL))
def test_annotations(name):
  signature = inspect.signature(public()[name])
  untyped = [p.name for p in signature.parameters.values()
             if p.annotation is p.empty and p.name != "self"]
  assert not untyped
  assert signature.return_annotation is not signature.empty


def test_checkers_are_told():
  assert os.path.exists(
      os.path.join(os.path.dirname(wrapopt.__file__), "py.typed"))
