"""The statistics of batch normalizations, for averaged weights."""

from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from wrapopt._averages import _replicas
from wrapopt.keras._evaluation import _block
from wrapopt.keras._variables import value_of


def recalibrate_batch_norm(model: keras.Model, dataset: Iterable[Any]) -> None:
  """Sets moving statistics of batch normalizations to those of a data set.

  The moving statistics come from the raw weights of the training, and do not
  fit the averaged weights. One pass over the data set sets the mean and the
  variance of each `keras.layers.BatchNormalization` to those of all its inputs
  in this pass: exactly, whatever the sizes of batches. As in training, such a
  layer normalizes by the statistics of each batch; all other layers run as in
  inference, so dropout is off. A frozen layer (`trainable = False`) is not
  changed. The `call` of a subclass runs as in training; the inputs are those
  that it gives to `super().call`.

  Example:

      model.fit(...)  # Ends with the averages in place of the weights.
      wrapopt.keras.recalibrate_batch_norm(model, dataset)

      # Or during training; the block restores weights and statistics:
      with optimizer.averaged_weights(model):
        wrapopt.keras.recalibrate_batch_norm(model, dataset)
        model.evaluate(...)

  Args:
    model: A Keras model, which is built.
    dataset: Batches as for `fit`: a `tf.data.Dataset` or another iterable of x,
      (x, y) or (x, y, sample_weight); x alone is used.

  Raises:
    TypeError: If `dataset` is not an iterable of batches.
    ValueError: If the model is not built, `dataset` is empty or infinite, or
      the `call` of a subclass does not call `super().call`. The model is then
      unchanged.

  References: Izmailov et al., "Averaging weights leads to wider optima and
  better generalization", UAI 2018, section 3.2.

  Differences from the paper, and from PyTorch's `update_bn`: the variance is
  that of the whole set, not the mean of the batches' variances; batches are
  weighted by their sizes; dropout is off.
  """
  _check_dataset("dataset", dataset)
  _Pass(model).run(dataset)


class _Pass:
  """A pass over a data set, as in `recalibrate_batch_norm`.

  It runs the model in a function that is traced once for several passes.
  """

  def __init__(self, model):
    self._model = model
    self._not_built = [x for x in _all_layers(model) if not x.built]
    if self._not_built and not model.built:
      raise _not_built(model, self._not_built)
    self._moments = [_Moments(layer) for layer in layers(model)
                     if layer.trainable]

    @tf.function(reduce_retracing=True)
    def see(x):
      model(x, training=False)

    self._see = see

  def is_for(self, model):
    """Whether it still has the layers to recalibrate."""
    return (model is self._model and not self._not_built and
            [m.layer for m in self._moments] == trained(model))

  def run(self, dataset):
    """Sets the moving statistics."""
    if not self._moments and not self._not_built:
      return
    empty = True
    try:
      for m in self._moments:
        m.begin()
      for batch in dataset:
        self._see(keras.utils.unpack_x_y_sample_weight(batch)[0])
        empty = False
    finally:
      for m in self._moments:
        m.end()
    if empty:
      raise ValueError("`dataset` must have at least one batch, got none.")
    not_built = [x for x in self._not_built if x.built]
    if not_built:
      raise _not_built(self._model, not_built)
    # All values, before any variable is changed.
    for variable, value in [pair for m in self._moments
                            for pair in m.new_values()]:
      variable.assign(value)


def check_recalibrate(recalibrate):
  """Raises an error if an argument `recalibrate` cannot be used repeatedly.

  It is a data set for `recalibrate_batch_norm`, False or None.
  """
  if recalibrate is None or recalibrate is False:
    return
  _check_dataset("recalibrate", recalibrate)
  if isinstance(recalibrate, Iterator):
    raise TypeError(
        "`recalibrate` must be a data set that can be read several times, got "
        f"the iterator {type(recalibrate).__qualname__}. Pass a "
        "tf.data.Dataset or a list of batches.")


def _check_dataset(name, dataset):
  if isinstance(dataset, (np.ndarray, tf.Tensor, str, bytes, dict)) or (
      not hasattr(dataset, "__iter__")):
    raise TypeError(
        f"`{name}` must be an iterable of batches, such as a tf.data.Dataset, "
        f"got {type(dataset).__qualname__}. Convert an array x with "
        "tf.data.Dataset.from_tensor_slices(x).batch(128).")
  if isinstance(dataset, tf.data.Dataset) and (
      dataset.cardinality() == tf.data.INFINITE_CARDINALITY):
    raise ValueError(f"`{name}` must be finite, got one that repeats without "
                     "end. Use dataset.take(number_of_batches).")


def _not_built(model, not_built):
  return ValueError(
      f"`model` must be built, got '{model.name}', whose batch normalization "
      f"'{not_built[0].name}' has no variables. Call the model on a batch "
      "first.")


def layers(model):
  """The built batch normalizations of a model: a list."""
  return [layer for layer in _all_layers(model) if layer.built]


def _all_layers(model):
  return [layer for layer in model._flatten_layers()
          if isinstance(layer, keras.layers.BatchNormalization)]


def statistics(model):
  """The moving statistics of batch normalizations: a list of variables."""
  return [v for layer in layers(model) for v in _statistics_of(layer)]


def _statistics_of(layer):
  return [v for v in layer.non_trainable_variables
          if not any(v is w for w in (layer.gamma, layer.beta))]


def averaged_statistics(model, averages):
  """The moving statistics that an optimizer averages.

  Args:
    model: A model.
    averages: A function of a batch normalization that returns whether those of
      this layer are averaged.

  Returns:
    {index among `statistics(model)`: variable}.
  """
  chosen = [(v, is_averaged) for layer in layers(model)
            for is_averaged in [averages(layer)] for v in _statistics_of(layer)]
  return {i: v for i, (v, is_averaged) in enumerate(chosen) if is_averaged}


def is_trained(layer, model, trains):
  """Whether an optimizer trains a batch normalization of a model.

  It does if it trains its gamma or beta. If a layer that is not frozen has none
  to train, the other weights of the innermost layer around it that has any tell
  to which network it belongs: the optimizer must train one of them.

  Args:
    layer: A batch normalization.
    model: A model that contains it.
    trains: A function of a variable that returns whether it is trained.
  """
  if any(map(trains, layer.variables)):
    return True
  if not layer.trainable or layer.trainable_variables:
    return False
  around = [x for x in model._flatten_layers()
            if any(y is layer for y in x._flatten_layers())]
  # The innermost has the fewest layers.
  for x in sorted(around, key=lambda x: len(x._flatten_layers())):
    no_weights = set(map(id, [*layer.variables, *statistics(x)]))
    weights = [v for v in x.variables if id(v) not in no_weights]
    if weights:
      return any(map(trains, weights))
  return False


def trained(model):
  """The batch normalizations whose statistics a training changes: a list."""
  return [layer for layer in _all_layers(model) if layer.trainable]


def warning(what, model):
  """The text of a warning that statistics do not fit averaged weights."""
  return (
      f"{what} the weights with moving statistics of the raw weights, which do "
      f"not fit them, in the batch normalizations of '{model.name}'. Pass "
      "recalibrate=dataset, a finite data set of training batches; or make the "
      "MovingAverage with average_batch_norm=True; or pass recalibrate=False "
      "to keep these statistics.")


@contextlib.contextmanager
def restored(model):
  """Restores the statistics of a model after a `with` block, bit for bit."""
  before = [(v, v.read_value()) for v in _values(model)]
  try:
    yield
  finally:
    for variable, value in before:
      variable.assign(value)


class Recalibration:
  """Recalibrates a model repeatedly with one data set."""

  def __init__(self, dataset):
    self._dataset = dataset
    self._pass = None

  def of(self, model):
    """Recalibrated statistics `Beside` those of a model, which it keeps."""
    if self._pass is None or not self._pass.is_for(model):
      self._pass = _Pass(model)
    with restored(model):
      self._pass.run(self._dataset)
      return _block.OtherValues(statistics(model))


def _values(model):
  """The statistics of a model: TensorFlow's variables, of each replica."""
  return [value for v in statistics(model)
          for value in _replicas.values(value_of(v))]


class _Moments:
  """The count, mean and sum of squared deviations of a layer's inputs.

  They are merged as in Chan, Golub and LeVeque, "Updating formulae and a
  pairwise algorithm for computing sample variances", 1979.
  """

  def __init__(self, layer):
    self.layer, self._class = layer, type(layer)
    # Whether a `call` of the layer, and one of BatchNormalization, was traced.
    self._is_called = self._is_reached = False
    zeros = tf.zeros(layer.moving_mean.shape, tf.float64)
    # A count per channel, since a mask may differ between channels.
    self._count = tf.Variable(0, dtype=tf.float64, trainable=False)
    self._mean = tf.Variable(zeros, trainable=False)
    self._squares = tf.Variable(zeros, trainable=False)

  def begin(self):
    """Records the inputs of BatchNormalization's `call` from now on."""
    for variable in self._count, self._mean, self._squares:
      variable.assign(tf.zeros_like(variable))
    moments, own = self, self._class
    base = keras.layers.BatchNormalization

    class Recorded(base):

      def call(self, inputs, training=None, mask=None):
        del self, training
        return moments._call(inputs, mask)

    class Called(*((Recorded,) if own is base else (own, Recorded))):

      def call(self, *args, **kwargs):
        moments._is_called = True
        if "training" in kwargs:
          kwargs["training"] = True
        return super().call(*args, **kwargs)

    # Where `own` calls super().call, it now calls that of Recorded.
    self.layer.__class__ = Called

  def end(self):
    """Undoes `begin`."""
    self.layer.__class__ = self._class

  def _call(self, inputs, mask):
    self._is_reached = True
    layer = self.layer
    x = tf.cast(inputs, tf.float64)
    weights = tf.ones(tf.shape(x), tf.float64)
    if mask is not None:
      weights *= tf.cast(tf.expand_dims(mask, -1), tf.float64)
    axes = layer._reduction_axes
    kept = lambda y: tf.reshape(y, self._broadcast)
    count = tf.reduce_sum(weights) / layer.moving_mean.shape[0]
    mean = tf.math.divide_no_nan(tf.reduce_sum(x * weights, axes), count)
    squares = tf.reduce_sum(
        weights * tf.square(x - kept(mean)), axes)
    self._merge(count, mean, squares)
    variance = tf.math.divide_no_nan(squares, count)
    y = (x - kept(mean)) * tf.math.rsqrt(kept(variance) + layer.epsilon)
    if layer.scale:
      y *= tf.cast(kept(layer.gamma), tf.float64)
    if layer.center:
      y += tf.cast(kept(layer.beta), tf.float64)
    return tf.cast(y, layer.compute_dtype)

  @property
  def _broadcast(self):
    shape = [1] * self.layer.input_spec.ndim
    shape[self.layer.axis] = -1
    return shape

  def _merge(self, count, mean, squares):
    total = self._count + count
    share = tf.math.divide_no_nan(count, total)
    delta = mean - self._mean
    self._squares.assign_add(
        squares + tf.square(delta) * self._count * share)
    self._mean.assign_add(delta * share)
    self._count.assign(total)

  def new_values(self):
    """The layer's moving statistics: (variable, new value) pairs."""
    layer = self.layer
    if self._is_called and not self._is_reached:
      raise ValueError(
          f"`call` of {self._class.__qualname__} must call super().call, so "
          f"that its inputs can be seen, got another one in '{layer.name}'. "
          "Set `trainable = False` to leave the layer as it is.")
    if self._count == 0:  # The model did not call it.
      return []
    mean, variance = self._mean.read_value(), self._squares / self._count
    new = {"moving_mean": mean, "moving_variance": variance}
    if getattr(layer, "renorm", False):  # Not in Keras 3.12.
      stddev = tf.sqrt(variance + layer.epsilon)
      new.update(moving_stddev=stddev, renorm_mean=mean, renorm_stddev=stddev)
    return [(getattr(layer, name),
             tf.cast(value, getattr(layer, name).dtype))
            for name, value in new.items()]
