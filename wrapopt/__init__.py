"""wrapopt: averaging and gating wrappers for TensorFlow optimizers.

Thin Python classes use native ops that work in one pass over memory. See the
README. The guide "Which average should I use?" tells which wrappers may wrap
which others; for all other pairs, the constructor raises a ValueError with the
reason.
"""

import typing

from wrapopt import _native  # First: its error is clearer than TensorFlow's.
from wrapopt import _tf
from wrapopt import sysconfig
from wrapopt.version import __version__

__all__ = [
    "BEMA",
    "CrossShardOptimizer",
    "DelayCompensation",
    "DiLoCo",
    "DropStaleGradientOptimizer",
    "ElasticAverageCustomGetter",
    "ElasticAverageOptimizer",
    "GapAware",
    "HalfLife",
    "LazyAdamOptimizer",
    "LocalSGD",
    "ModelAverageCustomGetter",
    "ModelAverageOptimizer",
    "MovingAverageOptimizer",
    "PowerDecay",
    "PrimalAverageOptimizer",
    "ScheduleFreeOptimizer",
    "__version__",
    "ops",
    "read_center",
    "sysconfig",
]

if typing.TYPE_CHECKING or _tf.is_there:
  from wrapopt import _loader  # First: checks TensorFlow, loads the library.
  from wrapopt import ops
  from wrapopt._averages._decay import BEMA
  from wrapopt._averages._decay import HalfLife
  from wrapopt._averages._decay import PowerDecay
  from wrapopt._gates._policies import DelayCompensation
  from wrapopt._gates._policies import GapAware
  from wrapopt._local._jobs import read_center
  from wrapopt.cross_shard import CrossShardOptimizer
  from wrapopt.diloco import DiLoCo
  from wrapopt.drop_stale_gradient import DropStaleGradientOptimizer
  from wrapopt.elastic_average import ElasticAverageCustomGetter
  from wrapopt.elastic_average import ElasticAverageOptimizer
  from wrapopt.lazy_adam import LazyAdamOptimizer
  from wrapopt.local_sgd import LocalSGD
  from wrapopt.model_average import ModelAverageCustomGetter
  from wrapopt.model_average import ModelAverageOptimizer
  from wrapopt.moving_average import MovingAverageOptimizer
  from wrapopt.primal_average import PrimalAverageOptimizer
  from wrapopt.schedule_free import ScheduleFreeOptimizer

  del _loader
else:
  __getattr__ = _tf.refuse(__name__, __all__)

del _native
