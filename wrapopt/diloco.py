"""Workers that train alone, and an outer optimizer that moves their center."""

from collections.abc import Sequence
import os
from typing import Any, Optional, Union

from wrapopt import _checks
from wrapopt._local import _training


class DiLoCo(_training.LocalTraining):
  """Trains a model in each worker, and takes outer steps at intervals.

  As `LocalSGD`, but the next center is not the mean `m` of the workers. It is
  an outer step of SGD with Nesterov's momentum, whose gradient is the way that
  the workers have gone: with the velocity `b`, 0 at first,

      D      = center - m
      b      = outer_momentum b + D
      center = center - outer_learning_rate (D + outer_momentum b)

  So the first outer step goes `outer_learning_rate (1 + outer_momentum)`, by
  default 1.33, times the way to the mean. The servers take it in one pass over
  memory. The inner optimizer's state stays with the worker.

  If a server is lost and restarted, a worker gives it the center; the velocity
  of its part starts at 0 again, with a warning.

  Example, of one worker, which moves the weight by 1 in each round:

  >>> server = tf.distribute.Server.create_local_server()
  >>> w = tf.Variable(0.)
  >>> local = wrapopt.DiLoCo([w], [server.target], "a", num_workers=1,
  ...                        sync_every=2)
  >>> for _ in range(4):
  ...   _ = w.assign_add(0.5)
  ...   local.step()
  ...   print(f"{w.numpy():.3f}")
  0.500
  1.330
  1.830
  3.227

  References: Douillard et al., "DiLoCo: distributed low-communication training
  of language models", 2023 (arXiv 2311.08105). The weights of workers are those
  of "Decoupled DiLoCo", 2026 (arXiv 2604.21428). `fragments` and
  `overlap_steps` are those of Douillard et al., "Streaming DiLoCo with
  overlapping communication", 2025 (arXiv 2501.18512), with `local_weight` as
  its alpha; its fragments may also be strided layers.
  """

  def __init__(self, variables: Sequence[Any], servers: Sequence[str],
               worker: str, num_workers: int, sync_every: int = 100, *,
               outer_learning_rate: float = 0.7, outer_momentum: float = 0.9,
               min_workers: Optional[int] = None,
               round_timeout_secs: float = 600,
               grace_secs: Optional[float] = None, weight: str = "steps",
               local_weight: float = 0.0, averaged: Sequence[Any] = (),
               dtype: Optional[str] = None, most_pushes: int = 4,
               progress: bool = False, only_finite: bool = True,
               name: str = "diloco", resume: bool = False,
               checkpoint: Union[str, os.PathLike, None] = None,
               fragments: int = 1, overlap_steps: int = 0) -> None:
    """Takes the center.

    Args:
      variables, servers, worker, num_workers, sync_every: As of `LocalSGD`.
      outer_learning_rate: The learning rate of the outer step, more than 0.
      outer_momentum: Its momentum, in [0, 1).
      min_workers, round_timeout_secs, grace_secs, weight, local_weight,
        averaged, dtype, most_pushes, progress, only_finite, name, resume,
        checkpoint, fragments, overlap_steps: As of `LocalSGD`.

    Raises:
      ValueError: If `outer_learning_rate` or `outer_momentum` is out of range.
      Others as `LocalSGD`.
    """
    _checks.number("outer_learning_rate", outer_learning_rate)
    _checks.fraction("outer_momentum", outer_momentum)
    if outer_momentum == 1:
      raise ValueError("`outer_momentum` must be less than 1, got "
                       f"{outer_momentum}.")
    super().__init__(
        variables, servers, worker, num_workers, sync_every, min_workers,
        round_timeout_secs, grace_secs, weight, local_weight, averaged, dtype,
        float(outer_learning_rate), float(outer_momentum), most_pushes,
        progress, only_finite, name, resume, checkpoint,
        fragments, overlap_steps)
