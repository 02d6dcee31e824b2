"""What the code of a random program calls, see `programs_code.py`.

A printed program begins with this file, so it imports nothing of the tests.
"""

import os
import shutil
import tempfile
import threading

# For sessions and functions that let XLA compile what it likes.
os.environ.setdefault("TF_XLA_FLAGS", "--tf_xla_cpu_global_jit")

import keras
import numpy as np
import tensorflow as tf
import wrapopt
import wrapopt.keras as wk

tf1 = tf.compat.v1
folder = tempfile.TemporaryDirectory()


def path(name):
  return os.path.join(folder.name, name)


def name_flags_in_a_file():
  """Lets XLA compile what it likes. TensorFlow reads it once in a process."""
  with open(path("flags"), "w", encoding="utf-8") as file:
    file.write("--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit")
  os.environ["TF_XLA_FLAGS"] = path("flags")


def check(what, got, want, tolerance=0.0):
  """Asserts that numbers are near to others."""
  got = np.asarray(got, np.float64)
  want = np.reshape(np.asarray(want, np.float64), got.shape)
  np.testing.assert_allclose(got, want, rtol=0, atol=tolerance, err_msg=what)


def check_one_of(what, got, wants, tolerance):
  """Asserts that numbers are near to those of one row."""
  assert any(np.allclose(got, want, 0, tolerance) for want in wants), (
      f"{what}: {got}, not one of {wants}")


def in_eager(function):
  """Calls a function outside of all graphs."""
  found = []
  together(lambda: found.append(function()))
  return found[0]


def same(what, got, want):
  """Asserts that arrays are equal bit for bit."""
  for x, y in zip(got, want, strict=True):
    assert (x.dtype, x.shape) == (y.dtype, y.shape), what
    assert x.tobytes() == y.tobytes(), f"{what}: {x}, not {y}"


def refused(what, function, error=RuntimeError):
  """Asserts that a function raises an error."""
  try:
    function()
  except error:
    return
  raise AssertionError(f"{what} raised no error")


def together(*bodies):
  """Runs functions at once, and asserts that none raises."""
  errors = []

  def guarded(body):
    try:
      body()
    except BaseException as e:
      errors.append(e)

  threads = [threading.Thread(target=guarded, args=[body], daemon=True)
             for body in bodies]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  if errors:
    raise errors[0]
  assert not any(thread.is_alive() for thread in threads), "deadlock"


# Numbers that all dtypes hold exactly.


def start(i, shape, fresh=False):
  """The initial value of the i-th variable."""
  if fresh:
    return np.full(shape, 3.0)
  return ((np.arange(np.prod(shape, dtype=int)) * 5 + 3 * i) % 7
          - 3.0).reshape(shape) / 4


def numbers(t, i, shape):
  """The t-th gradient of the i-th variable, or rows of it: never 0."""
  size = np.prod(shape, dtype=int)
  return (((np.arange(size) * 7 + 3 * t + 5 * i) % 8) - 3.5).reshape(shape) / 4


def indices(t, i, rows):
  """The rows of the t-th gradient of the i-th variable: some repeat."""
  return (np.arange(t % 4) * (t + 1) + i) % rows


def dense(t, i, shape, dtype, scale=1.0):
  return np.asarray(numbers(t, i, shape) * scale,
                    tf.as_dtype(dtype).as_numpy_dtype)


def rows(t, i, shape, dtype, scale=1.0):
  """(values, indices)."""
  at = indices(t, i, shape[0])
  return dense(t, i, (len(at), *shape[1:]), dtype, scale), at


def sparse(values, at, shape):
  return tf.IndexedSlices(tf.convert_to_tensor(values),
                          tf.convert_to_tensor(at),
                          tf.constant(shape, tf.int64))


def variable(i, shape, dtype, fresh=False):
  """The initial value of a variable as a tensor."""
  return tf.cast(start(i, shape, fresh), dtype)


def copies(tree):
  """Copies of variables in a structure."""
  return keras.tree.map_structure(
      lambda x: tf.convert_to_tensor(x).numpy(), tree)


def assign_all(variables, values):
  for variable, value in zip(variables, values, strict=True):
    variable.assign(value)


def pretrained(values):
  """Writes a checkpoint; returns its path."""
  tf.raw_ops.SaveV2(prefix=path("pretrained"), tensor_names=list(values),
                    shape_and_slices=[""] * len(values),
                    tensors=list(map(tf.constant, values.values())))
  return path("pretrained")


# A Keras model whose loss is the sum of the products of its variables with its
# inputs: these are the gradients.


@keras.saving.register_keras_serializable("fuzz")
class Product(keras.layers.Layer):
  """The sum of products; `specs` are (shape, dtype, is a table)."""

  def __init__(self, specs, **kwargs):
    super().__init__(**{**kwargs, "dtype": "float64", "autocast": False})
    self.specs = specs

  def build(self, _):
    self.v = [self.add_weight(shape=shape, dtype=dtype, name=f"v{i}",
                              initializer="zeros")
              for i, (shape, dtype, _) in enumerate(self.specs)]

  def call(self, x):
    total, at = tf.zeros([1], tf.float64), 0

    def take(n):
      nonlocal at
      at += n
      return x[0, at - n:at]

    for v, (shape, dtype, is_table) in zip(self.v, self.specs):
      v = v.value
      if is_table:
        v = tf.gather(v, tf.cast(take(3), tf.int64))
        shape = [3, *shape[1:]]
      g = tf.cast(take(np.prod(shape, dtype=int)), dtype)
      total += tf.cast(tf.reduce_sum(v * tf.reshape(g, shape)), tf.float64)
    return total

  def compute_output_shape(self, shape):
    return (1,)

  def get_config(self):
    return {**super().get_config(), "specs": self.specs}


@keras.saving.register_keras_serializable("fuzz")
def first(y_true, y_pred):
  del y_true
  return y_pred


def width(specs):
  return sum(3 + 3 * shape[1] if is_table else int(np.prod(shape, dtype=int))
             for shape, _, is_table in specs)


def make_model(specs, fresh=False):
  # A state tree knows variables by their paths, which Keras counts up.
  keras.utils.clear_session(free_memory=False)
  x = keras.Input((width(specs),), dtype="float64")
  model = keras.Model(x, Product(specs)(x))
  for i, (v, (shape, _, _)) in enumerate(zip(model.variables, specs)):
    v.assign(start(i, shape, fresh))
  return model


def batches(specs, steps):
  """A data set of (t, scale), a batch each."""
  x = []
  for t, scale in steps:
    parts = [np.zeros([0])]
    for i, (shape, _, is_table) in enumerate(specs):
      if is_table:
        values, at = rows(t, i, shape, "float64", scale)
        parts += [at, values]
      else:
        parts.append(dense(t, i, shape, "float64", scale))
    x.append(np.concatenate([np.ravel(p).astype(np.float64) for p in parts]))
  x = np.reshape(x, [len(steps), width(specs)])
  return tf.data.Dataset.from_tensor_slices((x, np.zeros([len(steps), 1]))
                                            ).batch(1)


def of_unknown_length(data):
  return data.filter(lambda x, y: True)


class Drawn(keras.utils.PyDataset):
  """One batch of some, another one each time."""

  def __init__(self, data):
    super().__init__()
    self.batches, self.at = list(data), 0

  def __len__(self):
    return 1

  def __getitem__(self, i):
    self.at += 1
    return self.batches[self.at % len(self.batches)]


def validated(model, specs, data, kind):
  """The validation losses of averages of all decays after a `fit`."""
  validation = batches(specs, [(t, 1.0) for t in (3, 7, 11)])
  drawn = {
      "batches": lambda: validation,
      "generator": lambda: (x for x in list(validation) * 9),
      "shuffled": lambda: validation.shuffle(3, seed=1).repeat(),
      "taken": lambda: validation.shuffle(3, seed=1).take(1),
      "sequence": lambda: Drawn(validation)}[kind]()
  logs = model.fit(
      data, validation_data=drawn, verbose=0, shuffle=False, callbacks=[
          wk.EvaluateWithAverages(decay="all")],
      validation_steps=1 if kind in ("generator", "shuffled") else None)
  return [x[0] for name, x in logs.history.items()
          if name.startswith("val_loss")]


def exported(session, to, signatures):
  """Writes a SavedModel with signatures: {name: (inputs, outputs)}."""
  shutil.rmtree(to, ignore_errors=True)
  builder = tf1.saved_model.Builder(to)
  infos = lambda tensors: {
      name: tf1.saved_model.build_tensor_info(x) for name, x in tensors.items()}
  builder.add_meta_graph_and_variables(
      session, [tf1.saved_model.tag_constants.SERVING], {
          name: tf1.saved_model.build_signature_def(*map(infos, of), name)
          for name, of in signatures.items()})
  builder.save()


def find(opt, cls):
  """The optimizer of a class, in others."""
  while not isinstance(opt, cls):
    opt = opt.inner_optimizer
  return opt
