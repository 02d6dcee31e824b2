"""Averages of checkpoints, computed after training.

The average of a run's checkpoints is often better than the last checkpoint.
These functions average files, without the model and its code:

    wrapopt.checkpoints.merge    the mean of checkpoints, a weighted mean, or
                                 the end of a learning rate's decay
    wrapopt.checkpoints.lawa     the mean of the latest checkpoints of a run
    wrapopt.checkpoints.ema      an exponential moving average along a run
    wrapopt.checkpoints.posthoc  the power-function average of any width, from
                                 the snapshots of a run with two such averages

The same as a command; `--help` lists its options:

    python -m wrapopt.checkpoints merge a.keras b.keras --output mean.keras

Inputs are checkpoints of TensorFlow (of `tf.compat.v1.train.Saver` and of
`tf.train.Checkpoint`, named by their prefix), `.weights.h5`, `.weights.json`
and `.keras` files of Keras, other HDF5 files of variables, and `.safetensors`
files of Hugging Face and others, also in shards
(`model.safetensors.index.json`). The output is a copy of the last input with
averaged values, and loads in the same way. If the last input is a
`.weights.json` file, which names the shards of the weights, the output is one
`.weights.h5` file. A directory means all checkpoints in it, sorted by name,
with numbers in names sorted by value; one with a `model.safetensors` or its
index means that. Then the output may be the name of a new directory.

TensorFlow is needed for its own checkpoints only: `pip install
wrapopt[checkpoints]` installs what all others need.

The functions average all variables of dtype float16, bfloat16, float32,
float64, and float8. They sum in float64 and round once, to the variable's dtype
in the last input. NaN is refused. So are quantized variables, which have
scales, unless they are equal in all inputs. The output tells how it was made:
in the metadata `wrapopt` of safetensors, in an attribute of HDF5 files, in a
file beside a TensorFlow checkpoint that ends in `.made.json`. All other data
are copied from the last input: integers (counts of steps), strings, and the
state of optimizers (slots, learning rates and averages). An optimizer is
recognized

  - in a file of `tf.train.Checkpoint` by its slots, or by its parts: an
    optimizer of Keras has `_iterations` with `_variables` or `_learning_rate`.
    The weights that it refers to, `_trainable_variables`, are averaged.
  - in a file of Keras by its group: that of the compiled model is `optimizer`.
    Elsewhere, such as in `g_optimizer` or in a part of the model that was
    compiled, its first variable is an integer, the count of steps, and the name
    of the attribute, of the list that holds it, or its own is that of an
    optimizer: it contains "optim", "opt" or the name of a class.

A Saver's file, and an HDF5 file of another program, do not distinguish slots
from weights. `only` selects the variables to average, in any format. The
command prints how many variables are averaged and copied, and why; with
`--verbose` it lists them. `python -m wrapopt.checkpoints list --variables`
lists those of a file before anything is written.

All inputs are checked before anything is written: they must have the same
variables, in the same shapes. Floating-point dtypes may differ. The checksums
of TensorFlow's checkpoints and of `.keras` files are verified; HDF5 files have
none. The output appears once it is complete and on the disk, or not at all.
Memory does not depend on the number and the size of the inputs. Variables of
safetensors are summed in parts, by as many threads as there are processors,
which takes some megabytes for each. Other formats take a few times the largest
variable in float64, and with TensorFlow a quarter of a gigabyte.

**Batch normalization.** The moving means and variances in an output do not fit
its weights: `merge`, `lawa` and `ema` average those of the inputs, and
`posthoc` keeps those of the last snapshot. Compute them again, with the output
in the model, before you evaluate it:

    model.load_weights("width.weights.h5")
    wrapopt.keras.recalibrate_batch_norm(model, dataset)

All steps to an average whose width is chosen after training:

1.  Keep two averages in the run, and write their snapshots:

        opt = wrapopt.keras.MovingAverage(
            "adam", [wrapopt.PowerDecay(0.05), wrapopt.PowerDecay(0.1)])
        snapshots = wrapopt.keras.Snapshots("run/snapshots", 500)
        model.compile(opt, ...)
        model.fit(..., callbacks=[snapshots])

    In a v1 session, pass `wrapopt.checkpoints.SnapshotHook` to a
    `MonitoredSession`.

2.  Compute averages of any width, and evaluate them:

        wrapopt.checkpoints.posthoc("run/snapshots", "width.weights.h5",
                                    relative_width=0.08)
        model.load_weights("width.weights.h5")
        wrapopt.keras.recalibrate_batch_norm(model, dataset)
        model.evaluate(...)

`python -m wrapopt.examples.averages widths` does both on real data.

References: Karras et al., "Analyzing and improving the training dynamics of
diffusion models" (EDM2), 2023, arXiv 2312.02696, section 3 and appendix C;
Kaddour, "Stop wasting my time! Saving days of ImageNet and BERT training with
latest weight averaging" (LAWA), 2022, arXiv 2209.14981; Wortsman et al., "Model
soups", 2022; Tian et al., "WSM: decay-free learning rate schedule via
checkpoint merging for LLM pre-training", ICLR 2026, arXiv 2507.17634.
"""

from collections.abc import Callable, Sequence
import contextlib
import math
import numbers
import os
import re
import tempfile
import typing
from typing import NamedTuple, Optional, Union

from wrapopt import _checks
from wrapopt import _extras
from wrapopt import _tf
from wrapopt import _widths
from wrapopt.checkpoints import _formats
from wrapopt.checkpoints import _merge
from wrapopt.checkpoints import _profiles
from wrapopt.checkpoints import _rate_decay

if typing.TYPE_CHECKING or _tf.is_there:
  from wrapopt.checkpoints._snapshots import SnapshotHook
else:
  __getattr__ = _tf.refuse(__name__, ["SnapshotHook"])

Plan = _merge.Plan

__all__ = ["Plan", "SnapshotHook", "ema", "lawa", "merge", "posthoc", "sweep"]

_Path = Union[str, bytes, os.PathLike]
_Paths = Union[_Path, Sequence[_Path]]
_Size = Union[int, str, None]
_Confirm = Callable[[_merge.Plan], bool]


def merge(inputs: _Paths, output: _Path,
          weights: Optional[Sequence[float]] = None, *,
          decay: Optional[str] = None, decay_steps: Optional[float] = None,
          steps: Optional[Sequence[float]] = None,
          base: Optional[_Path] = None, blend: Optional[float] = None,
          only: Optional[str] = None, allow_nan: bool = False,
          copy_rest: bool = False, max_shard_size: _Size = None,
          confirm: Optional[_Confirm] = None, progress: bool = False
          ) -> Optional[_profiles.Fit]:
  """Writes the mean of checkpoints, or a weighted mean.

  With `decay`, the weights are those that make the checkpoints of a constant
  learning rate into the result of a rate that decays to 0 at the last one
  (WSM). The two are equal if the gradients do not depend on the rate: for a
  short decay they hardly do, for a long one they do. The last part of a run,
  10 to 20 % of its steps, is usual. The moments of an optimizer and the rate of
  another decay play no part: the rate between the first and the last checkpoint
  must be constant. The mean of equally spaced checkpoints is nearly a linear
  decay.

  The inputs of a decay are checkpoints of the weights, or snapshots of
  `PowerDecay`s, of which it fits the best sum, as `posthoc` does. So snapshots
  need not be dense: those of two widths, 16 of each, give a linear decay of
  20 % of the run with an error of 1 %.

  The statistics of batch normalizations in the output do not fit its weights.
  `help(wrapopt.checkpoints)` says what to do.

  Args:
    inputs: A path, or a sequence of paths.
    output: The path of the output, which has the format of the last input.
    weights: A finite number for each input. They are divided by their sum,
      which must be greater than 0. None for the mean.
    decay: None, or the shape of a decay: "linear", "cosine" or "1-sqrt".
    decay_steps: The number of steps of the decay; by default all from the first
      input to the last.
    steps: The step of each input, if its name does not end with it. Those of
      snapshots are known.
    base: With `blend`, the path of another checkpoint; by default the last
      input.
    blend: None, or a finite number `a`: the output is then
      `(1 - a) base + a mean`, for example a blend of the last weights of a run
      with the mean of its tail.
    only: A regular expression. If given, the floating-point variables in whose
      names it is found are averaged, and all others are copied from the last
      input. By default, all floating-point variables but the state of
      optimizers are averaged.
    allow_nan: Whether values may be NaN.
    copy_rest: For safetensors, whether to copy the other files in the folder of
      the last input, such as the configuration and the tokenizer. Files of
      weights and of the state of a training are left out.
    max_shard_size: For safetensors, how large the shards of the output are at
      most: a number of bytes, or a string such as "5GB" or "500MB" (powers of
      1000). None for the shards of the last input.
    confirm: None, or a function of a `Plan`, which is called before anything is
      written: the weights of the inputs, what is averaged and copied, and how
      many bytes are read, written and in memory. If it returns False, nothing
      is written.
    progress: Whether to show a progress bar, which needs tqdm.

  Returns:
    None, or with `decay` a NamedTuple: `weights`, one for each input; and
    `error`, that of the factors of the rate, divided by the norm of what the
    decay takes from 1. It is 0 for checkpoints of the weights, whose factors
    are means between two of them.

  Raises:
    FileNotFoundError: If an input is missing.
    FileExistsError: If the output exists.
    OSError: If an input cannot be read, or the output cannot be written.
    ValueError: If the inputs have different variables or shapes, a number is
      out of range, the output's name belongs to another format, or the steps of
      a decay are unknown or do not rise.
  """
  if decay is None and (decay_steps, steps) != (None, None):
    raise ValueError(
        "`decay_steps` and `steps` must be given with `decay`, got "
        f"{decay_steps!r} and {steps!r} without it.")
  if decay is not None and weights is not None:
    raise ValueError(
        "`weights` must be None with `decay`, which computes them, got "
        f"{weights!r}.")
  if blend is None and base is not None:
    raise ValueError(f"`base` must be given with `blend`, got {base!r} alone.")
  if blend is not None and not (
      _checks.is_number(blend) and math.isfinite(blend)):
    raise ValueError(f"`blend` must be a finite number, got {blend!r}.")
  options = _options(only, allow_nan, copy_rest, max_shard_size, confirm,
                     progress)
  paths = _paths(inputs)
  with _opened([*([] if base is None else _paths(base)), *paths]) as sources:
    fitted = None if decay is None else _rate_decay.fit(
        sources[-len(paths):], decay, decay_steps, steps)
    scaled, unit = (_merge.checked_weights(weights, len(paths))
                    if fitted is None else (fitted.weights.tolist(), 1.0))
    if blend is not None:
      if len(sources) - len(paths) > 1:
        raise ValueError("`base` must be the path of one checkpoint, got "
                         f"{base!r}.")
      scaled, unit = [blend * weight / unit for weight in scaled], 1.0
      if base is None:
        scaled[-1] += 1 - blend
      else:
        scaled = [1 - blend, *scaled]
    _merge.weighted(sources, output, scaled, options, {
        "by": "merge", "decay": decay, "decay_steps": decay_steps,
        "blend": blend}, unit)
  return fitted


def ema(inputs: _Paths, output: _Path, decay: float = 0.5, *,
        only: Optional[str] = None, allow_nan: bool = False,
        copy_rest: bool = False, max_shard_size: _Size = None,
        confirm: Optional[_Confirm] = None, progress: bool = False) -> None:
  """Writes the exponential moving average along checkpoints.

  It starts at the first input. Each of the others moves it:

      s += (1 - decay) (v - s)

  Batch normalizations: see `merge`.

  Args:
    inputs: As in `merge`, in the order of training.
    output: As in `merge`.
    decay: A number in [0, 1].
    only, allow_nan, copy_rest, max_shard_size, confirm, progress: As in
      `merge`.

  Raises:
    The same errors as `merge`; also ValueError if the numbers at the ends of
    the inputs' names do not rise.
  """
  if not _checks.is_number(decay) or not 0 <= decay <= 1:
    raise ValueError(f"`decay` must be a number in [0, 1], got {decay!r}.")
  options = _options(only, allow_nan, copy_rest, max_shard_size, confirm,
                     progress)
  paths = _paths(inputs)
  _rate_decay.check_order(paths)
  with _opened(paths) as sources:
    n = len(sources)
    weights = [(1 - decay) * decay**(n - 1 - i) for i in range(n)]
    weights[0] = decay**(n - 1)
    _merge.weighted(sources, output, weights, options,
                    {"by": "ema", "decay": float(decay)})


def lawa(inputs: _Paths, output: _Path, window: int = 5, *,
         only: Optional[str] = None, allow_nan: bool = False,
         copy_rest: bool = False, max_shard_size: _Size = None,
         confirm: Optional[_Confirm] = None, progress: bool = False) -> None:
  """Writes the mean of the latest checkpoints of a run.

  The statistics of batch normalizations in the output do not fit its weights.
  Load it into the model, then call
  `wrapopt.keras.recalibrate_batch_norm(model, dataset)`.

  Args:
    inputs: As in `merge`, in the order of training.
    output: As in `merge`.
    window: The number of checkpoints to average, an integer from 1 to the
      number of inputs.
    only, allow_nan, copy_rest, max_shard_size, confirm, progress: As in
      `merge`.

  Raises:
    The same errors as `merge`; also ValueError if the numbers at the ends of
    the inputs' names do not rise.
  """
  paths = _paths(inputs)
  if (isinstance(window, bool) or not isinstance(window, numbers.Integral) or
      not 1 <= window <= len(paths)):
    raise ValueError("`window` must be an integer from 1 to the number of "
                     f"inputs, {len(paths)}, got {window!r}.")
  _rate_decay.check_order(paths)
  merge(paths[-window:], output, only=only, allow_nan=allow_nan,
        copy_rest=copy_rest, max_shard_size=max_shard_size, confirm=confirm,
        progress=progress)


def posthoc(inputs: _Paths, output: _Path,
            relative_width: Optional[float] = None, *,
            gamma: Optional[float] = None, steps: Optional[float] = None,
            only: Optional[str] = None, allow_nan: bool = False,
            confirm: Optional[_Confirm] = None, progress: bool = False
            ) -> _profiles.Fit:
  """Writes a power-function average that is computed from snapshots of others.

  The snapshots come from a run with one or more `PowerDecay`s, best with two.
  The output is a weighted sum of the snapshots. Its profile, the weights of the
  training steps in it, is the least-squares fit to the profile of the wanted
  average. The error of the profile is the only error of the result. With the
  relative widths 0.05 and 0.10 and 16 snapshots of each, the error is 0.4 % for
  a width of 0.07 and 0.9 % for 0.15. Widths outside of this range need more
  snapshots (4 % for 0.03, 2 % for 0.20).

  The output has the statistics of batch normalizations of the last snapshot,
  which do not fit its weights. Load it into the model, then call
  `wrapopt.keras.recalibrate_batch_norm(model, dataset)`.

  Args:
    inputs: As in `merge`: all snapshots of one run, in any order.
    output: As in `merge`.
    relative_width: The relative width of the wanted average, as in
      `PowerDecay`.
    gamma: Instead of `relative_width`, the exponent of the wanted average.
    steps: The number of steps of the wanted average; by default the largest
      number of a snapshot. Later snapshots are not used.
    only, allow_nan, confirm, progress: As in `merge`.

  Returns:
    A NamedTuple: `weights`, one for each snapshot that is used, in the order of
    their steps; and `error`, the distance of the profile from the wanted one,
    divided by the norm of the wanted one.

  Raises:
    The same errors as `merge`; also ValueError if an input is not a snapshot of
    a `PowerDecay`.
  """
  wanted = _widths.exponent(relative_width, gamma)
  with _opened(inputs) as sources:
    for source in sources:
      if not source.note or source.note["gamma"] is None:
        raise ValueError(
            f"{source.path} must be a snapshot of a PowerDecay, got " + (
                f"a snapshot with the decay {source.note['decay']}."
                if source.note else
                "a checkpoint that is not a snapshot."))
    most = max(source.note["steps"] for source in sources)
    steps = most if steps is None else steps
    if not _checks.is_number(steps) or not 0 < steps <= most:
      raise ValueError(
          "`steps` must be a number greater than 0 and at most the steps of "
          f"the latest snapshot, {most}, got {steps!r}.")
    steps = float(steps)
    sources = sorted((s for s in sources if 0 < s.note["steps"] <= steps),
                     key=lambda s: (s.note["steps"], s.note["gamma"], s.path))
    if not sources:
      raise ValueError("`steps` must be at least the steps of the first "
                       f"snapshot, got {steps!r}.")
    fitted = _profiles.fit(
        [_profiles.Profile(s.note["gamma"], s.note["steps"]) for s in sources],
        _profiles.Profile(wanted, steps))
    _merge.weighted(
        sources, output, fitted.weights.tolist(),
        _options(only, allow_nan, False, None, confirm, progress),
        {"by": "posthoc", "gamma": wanted, "steps": steps})
  return fitted


class Width(NamedTuple):
  """The result of `sweep` for a relative width.

  Attributes:
    relative_width: The width.
    error: The error of the profile, see `posthoc`.
    quality: The result of the function `evaluate`.
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
    evaluate: A function of the path of a checkpoint. It returns a number. The
      checkpoint is removed after the call. If the model has batch
      normalizations, the function calls `wrapopt.keras.recalibrate_batch_norm`
      before it evaluates; otherwise the width of the best result may be wrong.
    relative_widths: The widths.
    steps: As in `posthoc`.
    only: As in `merge`.
    progress: As in `merge`.

  Returns:
    A list of `Width`s.

  Raises:
    The same errors as `posthoc`, and those of `evaluate`.
  """
  paths = _paths(inputs)
  # Check all arguments before the first width is evaluated.
  relative_widths = _checks.sequence("relative_widths", relative_widths)
  for width in relative_widths:
    _widths.gamma_of(width)
  if not callable(evaluate):
    raise TypeError("`evaluate` must be a function of a path, got "
                    f"{evaluate!r}.")
  ending = _formats.ending_of(paths[-1])
  found = []
  for width in relative_widths:
    with tempfile.TemporaryDirectory(
        prefix=".sweep-", dir=os.path.dirname(os.path.abspath(paths[-1]))) as d:
      path = os.path.join(d, f"width-{width:g}{ending}")
      error = posthoc(paths, path, width, steps=steps, only=only,
                      progress=progress).error
      quality = evaluate(path)
      try:
        found.append(Width(float(width), error, float(quality)))
      except (TypeError, ValueError):
        raise TypeError("`evaluate` must return a number, got "
                        f"{quality!r}.") from None
  return found


def _paths(inputs):
  """The paths of checkpoints in an argument `inputs`: a list."""
  if isinstance(inputs, (str, bytes, os.PathLike)):
    inputs = [inputs]
  paths = [path for given in _checks.sequence("inputs", inputs)
           for path in _formats.expand(given)]
  if not paths:
    raise ValueError("`inputs` must hold at least one path, got none.")
  return paths


@contextlib.contextmanager
def _opened(inputs):
  """The Sources of an argument `inputs`."""
  with contextlib.ExitStack() as stack:
    yield [stack.enter_context(contextlib.closing(_formats.open_source(path)))
           for path in _paths(inputs)]


def _options(only, allow_nan, copy_rest, max_shard_size, confirm, progress):
  """The Options of a merge."""
  size = max_shard_size
  if isinstance(size, str):
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?B)", size.strip().upper())
    size = match and int(float(match[1]) * 1000**(
        ["B", "KB", "MB", "GB", "TB"].index(match[2])))
  if size is not None or max_shard_size is not None:
    if not (isinstance(size, numbers.Integral) and size > 0) or isinstance(
        size, bool):
      raise ValueError(
          "`max_shard_size` must be a number of bytes greater than 0, or a "
          f"string such as '5GB', got {max_shard_size!r}.")
  return _merge.Options(
      only, _checks.boolean("allow_nan", allow_nan),
      _checks.boolean("copy_rest", copy_rest), size, confirm,
      _extras.load("tqdm").tqdm if progress else None)
