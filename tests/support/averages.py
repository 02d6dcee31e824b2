"""Trains with averages in each way there is, with one interface.

A way is a half of wrapopt, tf.compat.v1 or Keras; a mode; and whether one op
takes the step and moves the averages, or two.
"""

import contextlib
import functools
import re
import typing

import keras
import numpy as np
import tensorflow as tf

import training
import wrapopt
import wrapopt.keras as wk

v1 = tf.compat.v1
K = keras.optimizers


class Way(typing.NamedTuple):
  """Where a step runs.

  Attributes:
    half: "v1" or "keras".
    mode: "eager", "function", "jit", or a kind of variables in a session.
    one_pass: Whether one op takes a step and moves averages.
  """
  half: str
  mode: str
  one_pass: bool

  @property
  def is_graph(self):
    return self.mode in training.GRAPH_MODES

  def __str__(self):
    return f"{self.half}-{self.mode}-{'one' if self.one_pass else 'two'}"


TRACED = ("eager", "function", "jit")
WAYS = [Way(half, mode, one_pass) for half, modes in (
    ("v1", (*TRACED, *training.GRAPH_MODES)), ("keras", TRACED))
        for mode in modes for one_pass in (True, False)]


@keras.saving.register_keras_serializable("averages")
class OwnSGD(K.SGD):
  """A subclass may have overridden anything: its step is none of our ops."""


# By name: an optimizer of tf.compat.v1; one of Keras, and its like that no op
# serves.
INNER = {
    "sgd": (lambda: v1.train.GradientDescentOptimizer(1.0),
            lambda: K.SGD(1.0), lambda: OwnSGD(1.0)),
    "momentum": (lambda: v1.train.MomentumOptimizer(0.5, 0.5),
                 lambda: K.SGD(0.5, momentum=0.5),
                 lambda: OwnSGD(0.5, momentum=0.5)),
    "adagrad": (lambda: v1.train.AdagradOptimizer(0.5),
                lambda: K.Adagrad(0.5), lambda: type(
                    "Own", (K.Adagrad,), {})(0.5)),
    "adam": (lambda: v1.train.AdamOptimizer(0.5), lambda: K.Adam(0.5),
             lambda: K.Nadam(0.5)),
    "lazy_adam": (lambda: wrapopt.LazyAdamOptimizer(0.5),
                  lambda: wk.LazyAdam(0.5), lambda: wk.LazyAdam(0.5)),
}


def _map(function, arrays):
  return tf.nest.map_structure(
      lambda x: None if x is None else function(x), arrays)


class Run:
  """Variables that train, and their averages.

  Attributes:
    way: A Way.
    variables: {name: variable}.
    count: The global step, None in Keras.
    averaging: The optimizer with the averages.
    opt: The optimizer that takes the steps: it, or a wrapper around it.
  """

  def __init__(self, way, start, settings, inner="sgd",
               around=lambda opt: opt, wrappers=(
                   wrapopt.MovingAverageOptimizer, wk.MovingAverage)):
    """Makes the variables and the optimizer.

    Args:
      way: A Way.
      start: {name: initial value}.
      settings: A function of the run that returns the arguments.
      inner: A key of INNER, or a function of the run that makes an optimizer.
      around: A function of the optimizer that returns a wrapper.
      wrappers: The class with averages, in tf.compat.v1 and in Keras.
    """
    self.way, self._steps, self._initialized = way, {}, set()
    self.variables = {name: self.make(x, name) for name, x in start.items()}
    self.count = (None if way.half == "keras" else
                  v1.train.get_or_create_global_step() if way.is_graph else
                  self.make(np.int64(0), "global_step"))
    if not callable(inner):
      of_v1, of_keras, own = INNER[inner]
      inner = lambda run: (of_v1 if way.half == "v1" else
                           of_keras if way.one_pass else own)()
    self.averaging = wrappers[way.half == "keras"](
        inner(self), **settings(self), **({} if way.one_pass or
                                          way.half == "keras" else
                                          {"fused": False}))
    self.opt = around(self.averaging)
    self.session = v1.Session() if way.is_graph else None
    if way.half == "keras":
      self.opt.build(list(self.variables.values()))
    apply = lambda grads: self._apply(grads) and None
    self._function = apply if way.mode == "eager" else tf.function(
        apply, autograph=False, jit_compile=way.mode == "jit")

  def make(self, value, name):
    """A variable."""
    if self.way.half == "keras":
      return keras.Variable(value, dtype=value.dtype.name, name=name)
    if self.way.is_graph:
      return v1.get_variable(name, initializer=value)
    return tf.Variable(value, name=name)

  def _apply(self, given):
    variables = list(self.variables.values())
    grads = [tf.IndexedSlices(*g, tf.constant(list(v.shape)))
             if isinstance(g, tuple) else g for g, v in zip(given, variables)]
    if self.way.half == "keras":
      return self.opt.apply(grads, variables)
    return self.opt.apply_gradients(list(zip(grads, variables)), self.count)

  def _arrays(self, gradients):
    if not isinstance(gradients, dict):
      gradients = {name: np.full(tuple(v.shape), gradients)
                   for name, v in self.variables.items()}
    found = []
    for name, v in self.variables.items():
      dtype = tf.as_dtype(v.dtype).base_dtype.as_numpy_dtype
      g = gradients[name]
      found.append(None if g is None else (np.asarray(g[0], dtype), np.int32(
          g[1])) if isinstance(g, tuple) else np.asarray(g, dtype))
    return found

  def step(self, gradients):
    """Takes a step.

    Args:
      gradients: {name: an array, (values, rows) or None}; or a number, which is
        the gradient of each element.
    """
    if self.way.is_graph:
      self.session.run(*self.train_op(gradients))
    else:
      self._function(_map(tf.constant, self._arrays(gradients)))

  def train_op(self, gradients):
    """In a session: (op, feeds) of a step."""
    given = self._arrays(gradients)
    key = str(_map(np.shape, given))
    if key not in self._steps:
      feeds = _map(lambda x: v1.placeholder(x.dtype, x.shape), given)
      self._steps[key] = self._apply(feeds), feeds
      self.initialize()
    op, feeds = self._steps[key]
    return op, {feed: x for feed, x in zip(*map(
        tf.nest.flatten, (feeds, given))) if x is not None}

  def initialize(self):
    """In a session: variables that have no value yet."""
    new = [v for v in v1.global_variables() if v.name not in self._initialized]
    if new:
      self.session.run(v1.variables_initializer(new))
      self._initialized.update(v.name for v in new)

  def finalize(self):
    """In a session: nothing is added to the graph from now on."""
    if self.way.is_graph:
      self.session.graph.finalize()

  def read(self, *what):
    """Arrays of variables, averages or tensors."""
    if self.way.is_graph:
      self.initialize()
      return [np.array(x) for x in self.session.run(list(what))]
    return [tf.convert_to_tensor(x).numpy() for x in what]

  def value(self, name):
    return self.read(self.variables[name])[0]

  def average(self, name, decay=None):
    """An average; None if the variable has none."""
    try:
      average = self.averaging.average(self.variables[name], decay)
    except KeyError:
      return None
    return None if average is None else self.read(average)[0]

  def state(self):
    """Variables, averages and what the optimizer holds: arrays."""
    if self.way.half == "keras":
      held = self.opt.variables
    else:
      # In a process that has had these names, TensorFlow adds a number to
      # each, which changes their order.
      held = sorted(self.opt.variables(),
                    key=lambda v: re.sub(r"(_\d+)?:0$", "", v.name))
    return self.read(*self.variables.values(), *held)

  def counted(self):
    """The global step: none or one array."""
    return [] if self.count is None else self.read(self.count)

  def average_steps(self):
    steps = self.averaging.average_steps()
    return steps if steps is None or isinstance(steps, int) else int(
        self.read(steps)[0])

  def in_place(self, decay=None):
    """A block in which averages are in place of the weights."""
    return self.averaging.averaged_weights(
        *[self.session] * self.way.is_graph,
        **{} if decay is None else {"decay": decay})

  def seed(self):
    self.averaging.seed_averages(*[self.session] * self.way.is_graph)

  def _checkpoint(self):
    return tf.train.Checkpoint(opt=self.opt, **{
        name: getattr(v, "value", v) if self.way.half == "keras" else v
        for name, v in self.variables.items()}, **(
            {} if self.count is None else {"step": self.count}))

  @functools.cached_property
  def _savers(self):
    return {"saver": v1.train.Saver(),
            "swapping_saver": self.averaging.swapping_saver()}

  def save(self, how, path):
    """Writes a file, by one of `files`; returns its path."""
    if how == "checkpoint":
      return self._checkpoint().write(path)
    return self._savers[how].save(self.session, path)

  def restore(self, how, path):
    if how != "checkpoint":
      self._savers[how].restore(self.session, path)
      return None
    return self._checkpoint().read(path)

  def close(self):
    if self.session is not None:
      self.session.close()


def files(way):
  """The ways to save a run."""
  return ("saver", "swapping_saver") if way.is_graph else ("checkpoint",)


@contextlib.contextmanager
def running(way, *args, **kwargs):
  """A Run, in a graph of its own where it has a session."""
  with (training.graph_of(way.mode) if way.is_graph
        else contextlib.nullcontext()):
    run = Run(way, *args, **kwargs)
    try:
      yield run
    finally:
      run.close()


def averages_of(start, history, decay, every=1, start_step=0):
  """The average after each of the values, in float64.

  Args:
    start: The value before the first step.
    history: The values after steps.
    decay: A function of the number of the update, from 1.
    every: The averages move in the steps after `start_step` that it divides.
    start_step: The number of steps before averaging begins.
  """
  s, result = np.float64(start), []
  for t, value in enumerate(history, 1 - start_step):
    value = np.float64(value)
    if t <= 0:
      s = value
    elif t % every == 0:
      s = s + (1 - decay(t // every)) * (value - s)
    result.append(s)
  return result


def assert_close(got, want, updates=20, context=""):
  """Three roundings in each update, of numbers below 16."""
  bits = {4: 24, 8: 48}[got.itemsize]
  np.testing.assert_allclose(got, want, rtol=0, err_msg=context,
                             atol=3 * updates * 16 * 2.0**-bits)
