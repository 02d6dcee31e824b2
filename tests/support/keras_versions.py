"""What some tests need, and Keras 3.12, the oldest one, lacks."""

import keras
import pytest


def needs(name):
  """A mark that skips a test if Keras lacks the optimizer of this name."""
  return pytest.mark.skipif(not hasattr(keras.optimizers, name),
                            reason=f"Keras lacks {name}.")


def cases(names):
  """Names as parameters of a test; a "multi" in one means a MultiOptimizer."""
  return [pytest.param(name, marks=needs("MultiOptimizer"))
          if "multi" in name else name for name in names]
