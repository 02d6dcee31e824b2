"""Averages of checkpoints, made after training.

A run leaves checkpoints. Their averages are often better than the last of them,
and these functions make averages of files, without the model and its code:

    wrapopt.checkpoints.merge    the mean of checkpoints, or a weighted one
    wrapopt.checkpoints.lawa     the mean of the latest few of a run
    wrapopt.checkpoints.ema      an exponential moving average along a run
    wrapopt.checkpoints.posthoc  the power-function average of any width, of the
                                 snapshots of a run that kept two of them

The same as a command, which says more with `--help`:

    python -m wrapopt.checkpoints merge a.keras b.keras --output mean.keras

Inputs are checkpoints of TensorFlow (of `tf.compat.v1.train.Saver` and of
`tf.train.Checkpoint`, named by their prefix), `.weights.h5` and `.keras` files
of Keras, and other HDF5 files of variables. The output is the last input with
other values: plain TensorFlow or Keras loads it as it loads that. A directory
stands for all checkpoints in it, in the order of their names, in which numbers
count as such.

What is averaged: all variables of dtype float16, bfloat16, float32 and float64,
in float64, rounded once to their dtype in the last input. All else is the last
input's: integers (counts of steps), strings, and the state of optimizers where
the format tells it (slots, learning rates and kept averages in Keras's files
and in those of `tf.train.Checkpoint`). A Saver's file does not tell a slot from
a weight; `only` says which variables are averaged there, or anywhere.

Before anything is written, all inputs are checked: they must have the same
variables, in the same shapes. Dtypes may differ. The output appears when it is
whole and on the disk, or not at all. Files are read a few variables at a time:
memory is needed for half a gigabyte, or six times the largest variable of a
TensorFlow checkpoint, however many and however large the inputs are.

The whole way to a width that is chosen after training:

1. Keep two averages in the run, and write snapshots of them:

       opt = wrapopt.keras.MovingAverage(
           "adam", [wrapopt.PowerDecay(0.05), wrapopt.PowerDecay(0.1)])
       model.compile(opt, ...)
       model.fit(..., callbacks=[wrapopt.keras.Snapshots("run/snapshots", 500)])

   In a v1 session, `wrapopt.checkpoints.SnapshotHook` is a hook of a
   `MonitoredSession`.

2. Make an average of any width, or of several, and evaluate them:

       wrapopt.checkpoints.posthoc("run/snapshots", "width.weights.h5",
                                   relative_width=0.08)
       model.load_weights("width.weights.h5")

`python -m wrapopt.examples.posthoc_digits` goes this way on real data.

References: Karras et al., "Analyzing and improving the training dynamics of
diffusion models" (EDM2), 2023, arXiv 2312.02696, section 3 and appendix C;
Kaddour, "Stop wasting my time! Saving days of ImageNet and BERT training with
latest weight averaging" (LAWA), 2022, arXiv 2209.14981; Wortsman et al., "Model
soups", 2022.
"""

from collections.abc import Callable, Sequence
import contextlib
import numbers
import os
import tempfile
from typing import NamedTuple, Optional, Union

from wrapopt import _decays
from wrapopt import _extras
from wrapopt.checkpoints import _formats
from wrapopt.checkpoints import _merge
from wrapopt.checkpoints import _profiles
from wrapopt.checkpoints._snapshots import SnapshotHook

__all__ = ["SnapshotHook", "ema", "lawa", "merge", "posthoc", "sweep"]

_Path = Union[str, os.PathLike]
_Paths = Union[_Path, Sequence[_Path]]


def merge(inputs: _Paths, output: _Path,
          weights: Optional[Sequence[float]] = None, *,
          only: Optional[str] = None, progress: bool = False) -> None:
  """Writes the mean of checkpoints, or a weighted one.

  Args:
    inputs: A path, or a sequence of them.
    output: The path of what is written, of the format of the last input.
    weights: As many finite numbers as inputs, with a sum greater than 0, by
      which they are divided; None for the mean.
    only: A regular expression. Variables in whose names it is found are
      averaged, if they are floating-point; all others are the last input's. By
      default all are averaged but the state of optimizers.
    progress: Whether to show a progress bar, for which tqdm must be installed.

  Raises:
    FileNotFoundError: If an input is missing.
    FileExistsError: If there is an output already.
    OSError: If an input cannot be read, or the output cannot be written.
    ValueError: If inputs do not go together, a number is out of range, or the
      output's name is of another format.
  """
  with _opened(inputs) as sources:
    _merge.weighted(sources, os.fspath(output),
                    _merge.checked_weights(weights, len(sources)), only,
                    _bar(progress))


def ema(inputs: _Paths, output: _Path, decay: float = 0.5, *,
        only: Optional[str] = None, progress: bool = False) -> None:
  """Writes the exponential moving average along checkpoints.

  It starts at the first input, and moves for each of the others:

      s += (1 - decay) (v - s)

  Args:
    inputs: As in `merge`, in the order of training.
    output: As in `merge`.
    decay: A number in [0, 1].
    only: As in `merge`.
    progress: As in `merge`.

  Raises:
    As `merge`.
  """
  if not isinstance(decay, numbers.Real) or not 0 <= decay <= 1:
    raise ValueError(f"`decay` must be in [0, 1], got {decay!r}.")
  with _opened(inputs) as sources:
    n = len(sources)
    weights = [(1 - decay) * decay**(n - 1 - i) for i in range(n)]
    weights[0] = decay**(n - 1)
    _merge.weighted(sources, os.fspath(output), weights, only, _bar(progress))


def lawa(inputs: _Paths, output: _Path, window: int = 5, *,
         only: Optional[str] = None, progress: bool = False) -> None:
  """Writes the mean of the latest checkpoints of a run.

  Args:
    inputs: As in `merge`, in the order of training.
    output: As in `merge`.
    window: How many of them count, an integer from 1 to their number.
    only: As in `merge`.
    progress: As in `merge`.

  Raises:
    As `merge`.
  """
  paths = _paths(inputs)
  if (isinstance(window, bool) or not isinstance(window, numbers.Integral) or
      not 1 <= window <= len(paths)):
    raise ValueError("`window` must be an integer from 1 to the number of "
                     f"inputs, {len(paths)}, got {window!r}.")
  merge(paths[-window:], output, only=only, progress=progress)


def posthoc(inputs: _Paths, output: _Path,
            relative_width: Optional[float] = None, *,
            gamma: Optional[float] = None, steps: Optional[float] = None,
            only: Optional[str] = None, progress: bool = False
            ) -> _profiles.Fit:
  """Writes the average of a power function, made of snapshots of others.

  The snapshots are those of a run with two or more `PowerDecay`s, or with one.
  Their weighted sum whose profile over the steps of training is nearest to the
  wanted one, in the sense of least squares, is what that average would have
  been, but for the error of the profile. With the relative widths 0.05 and 0.10
  and 16 snapshots of each, that is 0.4 % for a width of 0.07 and 0.9 % for
  0.15; widths beyond the two take more snapshots (4 % for 0.03, 2 % for 0.20).

  Args:
    inputs: As in `merge`: all snapshots of one run, in any order.
    output: As in `merge`.
    relative_width: The relative width of the wanted average, as in
      `PowerDecay`.
    gamma: In place of that, its exponent.
    steps: After how many steps of the averages; by default the most that a
      snapshot has. Later snapshots do not count.
    only: As in `merge`.
    progress: As in `merge`.

  Returns:
    A NamedTuple: `weights`, one for each snapshot that counts, in the order of
    their steps, and `error`, the distance of their profile from the wanted one
    relative to the size of that.

  Raises:
    As `merge`; ValueError also if an input is no snapshot of a `PowerDecay`.
  """
  wanted = _decays.PowerDecay(relative_width, gamma=gamma)
  with _opened(inputs) as sources:
    for source in sources:
      if not source.note or source.note["gamma"] is None:
        raise ValueError(
            f"{source.path} must be a snapshot of a PowerDecay, got " + (
                f"one of {source.note['decay']}." if source.note else
                "a checkpoint without a note of what it is an average of."))
    most = max(source.note["steps"] for source in sources)
    steps = most if steps is None else steps
    if not isinstance(steps, (int, float)) or not 0 < steps <= most:
      raise ValueError("`steps` must be greater than 0 and at most the steps of "
                       f"the latest snapshot, {most}, got {steps!r}.")
    sources = sorted((s for s in sources if 0 < s.note["steps"] <= steps),
                     key=lambda s: (s.note["steps"], s.note["gamma"], s.path))
    if not sources:
      raise ValueError("`steps` must be at least the steps of the first "
                       f"snapshot, got {steps!r}.")
    fitted = _profiles.fit(
        [_profiles.Profile(s.note["gamma"], s.note["steps"]) for s in sources],
        _profiles.Profile(wanted.gamma, steps))
    _merge.weighted(sources, os.fspath(output), fitted.weights.tolist(), only,
                    _bar(progress))
  return fitted


class Width(NamedTuple):
  """What `sweep` has found for a relative width.

  Attributes:
    relative_width: The width.
    error: That of the profile, see `posthoc`.
    quality: What the function has returned.
  """
  relative_width: float
  error: float
  quality: float


def sweep(inputs: _Paths, evaluate: Callable[[str], float],
          relative_widths: Sequence[float], *, steps: Optional[float] = None,
          only: Optional[str] = None, progress: bool = False) -> list[Width]:
  """Evaluates the averages of several widths.

  Args:
    inputs: As in `posthoc`.
    evaluate: A function of the path of a checkpoint, which is removed after
      that. It returns a number.
    relative_widths: The widths.
    steps: As in `posthoc`.
    only: As in `merge`.
    progress: As in `merge`.

  Returns:
    A list of `Width`s.

  Raises:
    As `posthoc`, and what `evaluate` raises.
  """
  paths = _paths(inputs)
  # All of them are checked before the first takes its time.
  for width in relative_widths:
    _decays.PowerDecay(width)
  ending = _formats.ending_of(paths[-1])
  found = []
  for width in relative_widths:
    with tempfile.TemporaryDirectory(
        prefix=".sweep-", dir=os.path.dirname(os.path.abspath(paths[-1]))) as d:
      path = os.path.join(d, f"width-{width:g}{ending}")
      error = posthoc(paths, path, width, steps=steps, only=only,
                      progress=progress).error
      found.append(Width(float(width), error, float(evaluate(path))))
  return found


def _paths(inputs):
  """The paths that an argument `inputs` stands for: a list."""
  if isinstance(inputs, (str, os.PathLike)):
    inputs = [inputs]
  paths = [path for given in inputs for path in _formats.expand(given)]
  if not paths:
    raise ValueError("`inputs` must hold at least one path, got none.")
  return paths


@contextlib.contextmanager
def _opened(inputs):
  """The Sources of an argument `inputs`."""
  with contextlib.ExitStack() as stack:
    yield [stack.enter_context(contextlib.closing(_formats.open_source(path)))
           for path in _paths(inputs)]


def _bar(progress):
  return _extras.load("tqdm").tqdm if progress else None
