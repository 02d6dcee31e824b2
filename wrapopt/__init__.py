"""wrapopt: averaging and gating wrappers for TensorFlow optimizers.

Thin Python classes use native ops that work in one pass over memory. See the
README.

A wrapper may wrap another one, directly or with others in between, if the table
says so: rows wrap columns, in the same order. Otherwise the constructor raises
a ValueError with the reason.

    CrossShardOptimizer          no   yes  yes  yes  yes  yes
    DropStaleGradientOptimizer   yes  no   yes  yes  yes  no
    ElasticAverageOptimizer      yes  no   no   no   yes  no
    ModelAverageOptimizer        yes  no   no   no   yes  no
    MovingAverageOptimizer       yes  yes  yes  yes  no   no
    ScheduleFreeOptimizer        yes  no   no   no   no   no

The order matters. A MovingAverageOptimizer updates its averages after the step
of its inner optimizer: around a ModelAverageOptimizer, after a round; inside of
one, after the step and before the round. A gradient that a gate drops advances
no average, no count of steps and no round, whatever the order. If a wrapper is
inside or around an ElasticAverageOptimizer or ModelAverageOptimizer, its
variables are local to the worker, and no checkpoint holds them.
"""

from wrapopt import _loader  # First: checks TensorFlow, loads the library.
from wrapopt import ops
from wrapopt import sysconfig
from wrapopt._averages._decays import HalfLife
from wrapopt._averages._decays import PowerDecay
from wrapopt._gates._policies import DelayCompensation
from wrapopt._gates._policies import GapAware
from wrapopt.cross_shard import CrossShardOptimizer
from wrapopt.drop_stale_gradient import DropStaleGradientOptimizer
from wrapopt.elastic_average import ElasticAverageCustomGetter
from wrapopt.elastic_average import ElasticAverageOptimizer
from wrapopt.lazy_adam import LazyAdamOptimizer
from wrapopt.model_average import ModelAverageCustomGetter
from wrapopt.model_average import ModelAverageOptimizer
from wrapopt.moving_average import MovingAverageOptimizer
from wrapopt.schedule_free import ScheduleFreeOptimizer
from wrapopt.version import __version__

__all__ = [
    "CrossShardOptimizer",
    "DelayCompensation",
    "DropStaleGradientOptimizer",
    "ElasticAverageCustomGetter",
    "ElasticAverageOptimizer",
    "GapAware",
    "HalfLife",
    "LazyAdamOptimizer",
    "ModelAverageCustomGetter",
    "ModelAverageOptimizer",
    "MovingAverageOptimizer",
    "PowerDecay",
    "ScheduleFreeOptimizer",
    "__version__",
    "ops",
    "sysconfig",
]

del _loader
