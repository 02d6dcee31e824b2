"""Public methods of the wrappers with averages that replace their weights."""

from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
from typing import Any, Literal, Optional, Union
import warnings

import keras

from wrapopt._averages import _decay
from wrapopt.keras import batch_norm as _batch_norm
from wrapopt.keras._averages import _copies


class PublicMethods:
  """A base class beside `WrapperOptimizer`, which has what they call.

  It is no optimizer: so no wrapper is further from Keras's Optimizer.
  """

  _averages: Any
  _store: Any
  _require_built: Any
  _refuse_swapped_in: Any

  def average(self, variable: keras.Variable) -> Any:
    """The average of a variable.

    Args:
      variable: A variable that the optimizer was built with.

    Returns:
      The `keras.Variable` that holds its average. Before the first step, an
      average is its variable: to set it there, call `seed_averages` before.

    Raises:
      RuntimeError: If the optimizer is not built, or the average is in place of
        its variable.
      KeyError: If the optimizer does not have the variable, or does not average
        it.
    """
    return self._averages.average(variable)

  def seed_averages(self) -> None:
    """Sets every average to its variable's current value.

    For a run that resumes from a checkpoint without averages: restore it with
    `tf.train.Checkpoint`, then call this. Keras's own loading seeds missing
    averages itself. The averages have then begun: from now on, only steps and
    your own code change them.

    Raises:
      RuntimeError: If the optimizer is not built, or averages are in place.
    """
    self._require_built("seed_averages")
    self._refuse_swapped_in("seed_averages")
    self._store.state.seed()

  def assign_averages(self, model: keras.Model,
                      decay: Optional[_decay.Decay]) -> None:
    """Sets the variables of a model to their averages.

    Args:
      model: A model with variables that the optimizer averages.
      decay: Which of several decays; None for the first.

    Raises:
      RuntimeError: If averages are in place, or a variable that has an average
        has left the model.
      ValueError: If the optimizer averages no variable of `model`, or does not
        have the decay.
    """
    self._averages.assign(model, decay)

  @contextlib.contextmanager
  def averaged_weights(
      self, model: Optional[keras.Model] = None, *,
      decay: Optional[_decay.Decay] = None) -> Iterator[None]:
    """Puts the averages in place of the weights for a `with` block.

    Inside the block, every averaged variable holds its average, and the average
    has no value: `average` and reads of what it gave before raise an error.
    If a `tf.Variable` was taken before, or a `tf.function` traced before,
    TensorFlow's own op fails with its words, such as "Trying to read variable
    with wrong dtype. Expected float got INVALID". Leave the block first, or
    read the variable. After the block, also after an exception, both have their
    own values again, bit for bit. Buffers are exchanged: nothing is copied.
    Only if an average has another dtype than its variable, it is converted and
    copied into the variable.

    A step inside the block would start at the averages, and the averages would
    then contain it. So it raises an error and changes neither: a RuntimeError,
    or in a `tf.function` that was traced or compiled before, a
    `tf.errors.FailedPreconditionError`.

    Nor must anything else change the averaged variables, such as a step of
    another optimizer, or `set_weights`. At the end of the block, this is an
    error, too, and variables and averages get their values from before the
    block. In the block, a probe may train variables of its own.

    Args:
      model: The model whose variables get their averages; by default all
        variables of the optimizer. If given, the statistics of its batch
        normalizations are restored after the block, too, so that the block may
        call `recalibrate_batch_norm`.
      decay: Which of several decays; by default the first.

    Yields:
      None.

    Raises:
      RuntimeError: If the optimizer is not built, averages of this optimizer or
        of one inside are in place already, or a variable that has an average
        has left the model, as after `model.quantize`. After the block, if an
        average or an averaged variable was assigned in it, or a variable has
        left the model: all others then have their own values again.
      ValueError: If the optimizer averages no variable of `model`, or does not
        have the decay.
    """
    with self._averages.in_place(model, decay, must_stay=True), (
        contextlib.nullcontext() if model is None
        else _batch_norm.restored(model)):
      yield

  def averaged_model(
      self, model: keras.Model, *, decay: Optional[_decay.Decay] = None,
      recalibrate: Union[None, Iterable[Any], Literal[False]] = None,
  ) -> keras.Model:
    """Makes a copy of a model whose weights are the averages.

    The copy is not compiled, and shares nothing with the model. It is made by
    the model's `get_config` and `from_config`, and if these fail, by
    `keras.models.clone_model`, whose copy of a functional model is one of no
    other class. Weights without an average, such as those of frozen layers and
    those that `variables` excludes, are copied. Before any weight is set, the
    layers and weights of the copy are compared with those at the same places in
    the model.

    Example:

        optimizer.averaged_model(model, recalibrate=dataset).export("served")

    A model that is quantized loses the variables that have averages. So
    quantize the copy:

        optimizer.averaged_model(model).quantize("int8")

    Args:
      model: A model with variables that the optimizer averages.
      decay: Which of several decays; by default the first.
      recalibrate: A finite data set of training batches, with which
        `recalibrate_batch_norm` is called on the copy. None or False keeps the
        statistics of batch normalizations; None also warns, if the model has
        any that are trained, and the optimizer does not average them.

    Returns:
      A `keras.Model`.

    Raises:
      TypeError: If `model` is not a Keras model, or `recalibrate` is not a data
        set that can be read several times.
      RuntimeError: If the optimizer is not built, averages are in place, or a
        variable that has an average has left the model.
      ValueError: If the optimizer averages no variable of `model` or does not
        have the decay, if Keras cannot copy the model, if the copy has other
        layers or weights, or if `recalibrate` is infinite.
    """
    if not isinstance(model, keras.Model):
      raise TypeError(f"`model` must be a Keras model, got {model!r}.")
    _batch_norm.check_recalibrate(recalibrate)
    self._require_built("averaged_model")
    self._refuse_swapped_in("averaged_model")
    with self._averages.in_place(model, decay):
      weights = model.get_weights()
    copied = _copies.copied(model, weights)
    if recalibrate is not None and recalibrate is not False:
      _batch_norm.recalibrate_batch_norm(copied, recalibrate)
    elif (recalibrate is None and self._store.statistics is None and
          _batch_norm.trained(model)):
      warnings.warn(_batch_norm.warning("averaged_model() copies averages of",
                                        model), stacklevel=2)
    return copied

  def averages_by_decay(self, model: keras.Model) -> list[Any]:
    """The averages of a model's variables, for snapshots.

    Returns:
      A list of (decay or None, number of steps of the averages or None,
      function). The function maps a variable to its average or None.
    """
    return self._averages.by_decay(model)

  def set_model(self, model: keras.Model) -> None:
    """Sets the model that the optimizer trains."""
    self._averages.set_model(model)

  def decays(self) -> list[Any]:
    """The names or decays of the averages, the default first: a list."""
    return list(self._averages.public)
