"""Averaging wrappers for Keras 3 optimizers, on TensorFlow.

`import wrapopt` does not import this package, because it needs Keras.
"""

import keras as _keras

if not (3, 12) <= tuple(map(int, _keras.version().split(".")[:2])) < (4,):
  raise ImportError(
      f"wrapopt.keras needs Keras 3.12 or a later Keras 3, got Keras "
      f"{_keras.version()}. Install it with: pip install 'keras>=3.12,<4'")
if _keras.backend.backend() != "tensorflow":
  raise ImportError(
      "wrapopt.keras needs Keras's TensorFlow backend, got the backend "
      f"'{_keras.backend.backend()}'. Set the environment variable "
      "KERAS_BACKEND=tensorflow before Keras is imported.")

from wrapopt.keras.batch_norm import recalibrate_batch_norm
from wrapopt.keras.evaluate_with_averages import EvaluateWithAverages
from wrapopt.keras.lazy_adam import LazyAdam
from wrapopt.keras.drop_stale_gradient import DropStaleGradient
from wrapopt.keras.local_rounds import LocalRounds
from wrapopt.keras.lookahead import Lookahead
from wrapopt.keras.moving_average import MovingAverage
from wrapopt.keras.primal_average import PrimalAverage
from wrapopt.keras.schedule_free import ScheduleFree
from wrapopt.keras.snapshots import Snapshots
from wrapopt.keras.swa import SWA

__all__ = ["DropStaleGradient", "EvaluateWithAverages", "LazyAdam",
           "LocalRounds", "Lookahead", "MovingAverage", "PrimalAverage", "SWA",
           "ScheduleFree", "Snapshots", "recalibrate_batch_norm"]
