"""Workers that train alone, and replace their weights by the mean."""

from collections.abc import Sequence
import os
from typing import Any, Optional, Union

from wrapopt._local import _training


class LocalSGD(_training.LocalTraining):
  """Trains a model in each worker, and replaces all by their mean at intervals.

  Each worker takes `sync_every` steps of its inner optimizer. Then the mean of
  the workers' variables, with the workers' weights `n_k`,

      center = (sum_k n_k w_k) / (sum_k n_k)

  becomes the next center, and all workers resume from it: a round. Servers hold
  the center and end the rounds, so no worker is special. If a worker stops, a
  round ends without it after `round_timeout_secs`, if `min_workers` are there.
  A worker that is late or was restarted takes the center. A worker that is done
  leaves, at the end of a `with` block or by `leave`, and the others go on. The
  inner optimizer's state stays with the worker.

  The constructor takes the center from the servers. If they have none, the
  variables of the first worker become the center of round 0: a job begins. All
  workers of a job give the same settings, the same variables, and the same
  servers in the same order. A second job needs another `name`, or begins after
  `wrapopt.server.drop`; only a worker with `resume=True` goes on from a center
  that another process of its name has left.

  Means are computed in float32 (float64 for float64 variables), in the order in
  which workers arrive, so their last bits depend on it.

  Example, of one worker:

  >>> server = tf.distribute.Server.create_local_server()
  >>> w = tf.Variable([1., 2.])
  >>> local = wrapopt.LocalSGD([w], [server.target], "a", num_workers=1,
  ...                          sync_every=2)
  >>> for _ in range(4):
  ...   _ = w.assign_add([1., 1.])
  ...   local.step()
  >>> print(local.round, w.numpy())
  2 [5. 6.]

  With `fragments` and `overlap_steps`, values travel a part at a time, while
  the worker trains on. Fragments are contiguous; those of the paper may also be
  strided layers.

  References: Stich, "Local SGD converges fast and communicates little", 2018
  (arXiv 1805.09767); `tf.contrib.opt.ModelAverageOptimizer` of TensorFlow 1.15,
  which has equal weights; Douillard et al., "Streaming DiLoCo with overlapping
  communication", 2025 (arXiv 2501.18512), for `fragments`, `overlap_steps` and
  `local_weight`, its alpha.
  """

  def __init__(self, variables: Sequence[Any], servers: Sequence[str],
               worker: str, num_workers: int, sync_every: int = 100, *,
               min_workers: Optional[int] = None,
               round_timeout_secs: float = 600,
               grace_secs: Optional[float] = None, weight: str = "steps",
               local_weight: float = 0.0, averaged: Sequence[Any] = (),
               dtype: Optional[str] = None, most_pushes: int = 4,
               progress: bool = False, only_finite: bool = True,
               name: str = "local_sgd", resume: bool = False,
               checkpoint: Union[str, os.PathLike, None] = None,
               fragments: int = 1, overlap_steps: int = 0) -> None:
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
        restart. A restarted worker passes `resume=True`.
      num_workers: The number of workers.
      sync_every: The number of inner steps of this worker in a round. A slow
        worker may have a smaller one than others.
      min_workers: The number of workers that suffice for a round; by default
        all. A worker that has left counts as one of them: with 3 of 4, one may
        be missing, also when one of the others has left.
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
      dtype: In what values travel, for a slow network: "bfloat16", "int8" or
        "int4"; by default, up in the dtype of the variables and down in
        float32. A worker then sends how far it has gone from the center, and a
        server how far the center has gone. "int8" and "int4" are integers with
        a float32 scale for each 128. What rounding has lost is added to what
        is sent next. Not for float64 variables.
      most_pushes: How many workers may send values at a time: a server holds
        the values of at most that number of workers.
      progress: Whether to print a line for each round.
      only_finite: Whether a worker's values do not count in a round if one of
        them is NaN or infinite. The worker then sends none, logs a warning and
        takes the center of the round. It counts as one of `min_workers`, so
        others do not wait for it. `report.not_finite` has its name, in all
        workers.
      name: The name of the job on the servers. `wrapopt.read_center` reads its
        center.
      resume: Whether the worker may go on for an earlier process of its name,
        which then gets an error if it is alive, or take the place of a worker
        that has left. Use it in a program that is restarted if it dies. It
        changes nothing if the servers have no center.
      checkpoint: The path of a `tf.train.Checkpoint` that holds a `LocalSGD` or
        `DiLoCo` of the same variables; or a directory, whose latest checkpoint
        is taken if there is one. Servers that have no center, or an earlier
        one, or another one of its round, take its center. If some have lost
        their part of a later one, they do after half of `round_timeout_secs`,
        unless a worker comes that holds it.

      fragments: The number of groups of variables, each with a center and
        rounds of its own, which divides `sync_every`. Groups are contiguous,
        and of as equal bytes as whole variables allow. Every `sync_every /
        fragments` steps, the next group in turn takes part in its round. The
        same for all workers.
      overlap_steps: The number of steps that the worker takes while values
        travel in another thread, less than `sync_every / fragments`. After
        these steps, it waits for the end of the round, if that is not yet
        there, and assigns `center + local_weight (own - center)` of its values
        by then. So these steps are lost with `local_weight=0`.

    Raises:
      TypeError: If an argument is of a wrong type.
      ValueError: If a number is out of range, a variable is not finite, one is
        float64 and there is a `dtype`, or `checkpoint` does not have the center
        of these variables.
      tf.errors.DeadlineExceededError: If the servers are not found within
        `round_timeout_secs`, or some have lost their center and no worker that
        holds it came.
      tf.errors.InvalidArgumentError: If the servers have a job of this name
        with other variables, settings or servers: the error tells the first
        difference. Also if `num_workers` others are part of the job; and
        without `resume`, if another process has had the name `worker` in it.
    """
    super().__init__(
        variables, servers, worker, num_workers, sync_every, min_workers,
        round_timeout_secs, grace_secs, weight, local_weight, averaged, dtype,
        1.0, 0.0, most_pushes, progress, only_finite, name, resume, checkpoint,
        fragments, overlap_steps)
