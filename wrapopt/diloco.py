"""Workers that train alone, and an outer optimizer that moves their center."""

from collections.abc import Sequence
from typing import Any, Optional

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

  Reference: Douillard et al., "DiLoCo: distributed low-communication training
  of language models", 2023 (arXiv 2311.08105). The weights of workers are those
  of "Decoupled DiLoCo", 2026 (arXiv 2604.21428).
  """

  def __init__(self, variables: Sequence[Any], servers: Sequence[str],
               worker: str, num_workers: int, sync_every: int = 100, *,
               outer_learning_rate: float = 0.7, outer_momentum: float = 0.9,
               min_workers: Optional[int] = None,
               round_timeout_secs: float = 600,
               grace_secs: Optional[float] = None, weight: str = "steps",
               local_weight: float = 0.0, averaged: Sequence[Any] = (),
               most_pushes: int = 4, progress: bool = False,
               name: str = "diloco") -> None:
    """Takes the center.

    Args:
      variables: The variables to share, of dtype float16, bfloat16, float32 or
        float64: a list of `tf.Variable` or of Keras's variables, such as
        `model.trainable_variables`. All workers give variables of the same
        shapes, in the same order.
      servers: The addresses of the servers, such as "host:port": a list of
        strings, the same for all workers. Each is a `python -m wrapopt.server`
        and holds an equal part of the center.
      worker: This worker's name, different from all others and the same after a
        restart.
      num_workers: The number of workers.
      sync_every: The number of inner steps of this worker in a round. A slow
        worker may have a smaller one than others.
      outer_learning_rate: The learning rate of the outer step, more than 0.
      outer_momentum: Its momentum, in [0, 1).
      min_workers: The number of workers that suffice for a round; by default
        all.
      round_timeout_secs: How long a round waits for workers that are missing,
        and how long a worker waits for servers, in seconds.
      grace_secs: How long a round waits for others once it has `min_workers`,
        in seconds; by default until `round_timeout_secs`.
      weight: The weight of a worker's values in the mean: "steps" or
        "examples", those that it has done since the last round, or "equal".
      local_weight: The part of its own values that a worker keeps in a round,
        in [0, 1]: it resumes from `center + local_weight (own - center)`.
      averaged: Further variables, whose center is the mean, without an outer
        step: moving statistics of batch normalization, if the center is
        evaluated with them. By default they stay with the worker, which is
        right if statistics are computed anew before the center is evaluated.
      most_pushes: How many workers may send values at a time: a server holds
        the values of at most that number of workers.
      progress: Whether to print a line for each round.
      name: The name of the rounds on the servers.

    Raises:
      TypeError: If an argument is of a wrong type.
      ValueError: If a number is out of range.
      tf.errors.DeadlineExceededError: If the servers are not found within
        `round_timeout_secs`.
      tf.errors.InvalidArgumentError: If the servers have rounds of this name
        with other variables or settings, or `worker` is the name of another
        process that is alive.
    """
    _checks.number("outer_learning_rate", outer_learning_rate)
    _checks.fraction("outer_momentum", outer_momentum)
    if outer_momentum == 1:
      raise ValueError("`outer_momentum` must be less than 1, got "
                       f"{outer_momentum}.")
    super().__init__(
        variables, servers, worker, num_workers, sync_every, min_workers,
        round_timeout_secs, grace_secs, weight, local_weight, averaged,
        float(outer_learning_rate), float(outer_momentum), most_pushes,
        progress, name)
