"""wrapopt: averaging and gating wrappers for TensorFlow optimizers.

Native ops, one pass over memory, behind thin Python classes. See the README.

Wrappers wrap each other. This table says which may wrap (rows) which (columns,
in the same order), directly or with others in between. A constructor refuses
the rest with a ValueError that says why.

    CrossShardOptimizer          no   yes  yes  yes  yes
    DropStaleGradientOptimizer   yes  no   yes  yes  yes
    ElasticAverageOptimizer      yes  no   no   no   yes
    ModelAverageOptimizer        yes  no   no   no   yes
    MovingAverageOptimizer       yes  yes  yes  yes  no

The order matters. Averages of a MovingAverageOptimizer follow the step of what
it wraps: around a ModelAverageOptimizer, they follow its rounds; inside of one,
the steps before them. A gradient that a gate drops advances no average, no count
of steps and no round, wherever these stand. Variables that a wrapper makes for
an ElasticAverageOptimizer or ModelAverageOptimizer, inside or around, are the
worker's own, and no checkpoint holds them.
"""

from wrapopt import _loader  # First: checks TensorFlow, loads the library.
from wrapopt import ops
from wrapopt import sysconfig
from wrapopt._decays import HalfLife
from wrapopt._decays import PowerDecay
from wrapopt.cross_shard import CrossShardOptimizer
from wrapopt.drop_stale_gradient import DropStaleGradientOptimizer
from wrapopt.elastic_average import ElasticAverageCustomGetter
from wrapopt.elastic_average import ElasticAverageOptimizer
from wrapopt.lazy_adam import LazyAdamOptimizer
from wrapopt.model_average import ModelAverageCustomGetter
from wrapopt.model_average import ModelAverageOptimizer
from wrapopt.moving_average import MovingAverageOptimizer
from wrapopt.version import __version__

__all__ = [
    "CrossShardOptimizer",
    "DropStaleGradientOptimizer",
    "ElasticAverageCustomGetter",
    "ElasticAverageOptimizer",
    "HalfLife",
    "LazyAdamOptimizer",
    "ModelAverageCustomGetter",
    "ModelAverageOptimizer",
    "MovingAverageOptimizer",
    "PowerDecay",
    "__version__",
    "ops",
    "sysconfig",
]

del _loader
