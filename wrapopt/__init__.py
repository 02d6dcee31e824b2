"""wrapopt: averaging and gating wrappers for TensorFlow optimizers.

Native ops, one pass over memory, behind thin Python classes. See the README.
"""

from wrapopt import _loader  # First: checks TensorFlow, loads the library.
from wrapopt import ops
from wrapopt import sysconfig
from wrapopt.cross_shard import CrossShardOptimizer
from wrapopt.drop_stale_gradient import DropStaleGradientOptimizer
from wrapopt.elastic_average import ElasticAverageCustomGetter
from wrapopt.elastic_average import ElasticAverageOptimizer
from wrapopt.model_average import ModelAverageCustomGetter
from wrapopt.model_average import ModelAverageOptimizer
from wrapopt.moving_average import MovingAverageOptimizer
from wrapopt.version import __version__

__all__ = [
    "CrossShardOptimizer",
    "DropStaleGradientOptimizer",
    "ElasticAverageCustomGetter",
    "ElasticAverageOptimizer",
    "ModelAverageCustomGetter",
    "ModelAverageOptimizer",
    "MovingAverageOptimizer",
    "__version__",
    "ops",
    "sysconfig",
]

del _loader
