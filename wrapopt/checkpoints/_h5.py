"""HDF5 files of variables, as Keras writes them."""

import collections
import contextlib
import io
import json
import os
import re

import h5py
import numpy as np

from wrapopt.checkpoints import _sink
from wrapopt.checkpoints import _source
from wrapopt.checkpoints import _trees

# Names of layers that are batch normalizations.
_BATCH_NORM = re.compile(r"batch_?norm|(^|_)bn(\d|_|$)", re.IGNORECASE)

# Names of optimizers: what attributes of models are called, and the classes of
# Keras and of wrapopt, whose names are the default.
_OPTIMIZER = re.compile(
    r"(?i:optim|ada(m|grad|delta|factor)|rmsprop|ftrl|sgd)|"
    r"(^|_)opts?([A-Z\d_]|$)|"
    r"(^|_)(lamb|lion|muon|schedule_free|moving_average|swa|lookahead|"
    r"primal_average|drop_stale_gradient)([\d_]|$)")


class _Drain(io.FileIO):
  """A file for HDF5 to write to, in which no write fails.

  HDF5 crashes if it closes a file that it could not write, as on a full disk.
  So it does not learn of an error, and the sink raises it.

  Attributes:
    error: The first OSError, or None. Nothing is written after it.
  """

  def __init__(self, path):
    super().__init__(path, "w+")
    self.error = None

  def write(self, data):
    data = memoryview(data).cast("B")
    size = len(data)
    while data and self.error is None:
      try:
        data = data[super().write(data):]
      except OSError as e:
        self.error = e
    return size

  def truncate(self, size=None):
    try:
      return super().truncate(size) if self.error is None else size
    except OSError as e:
      self.error = e
      return size


class H5Sink(_sink.Sink):
  """Writes an HDF5 file of variables."""

  def __init__(self, path, note=None, like=None, made=None):
    """Makes the file.

    Args:
      path: Its path.
      note: The note of a snapshot, a dict, or None.
      like: A Source, or another object with its `trees` and `datasets`, whose
        groups, links and attributes are copied. None for none.
      made: As in `_sink.Sink`.
    """
    super().__init__(path)
    self._name = os.path.join(self._directory, os.path.basename(path))
    self._trees = [] if like is None else like.trees
    self._like = {} if like is None else like.datasets
    self._drain = self._file = None
    try:
      with self._writing():
        self._drain = _Drain(self._name)
      with self._drained():
        self._file = h5py.File(self._drain, "w", libver=max(
            map(_trees.libver_of, self._trees), key=bool, default=None))
        for tree in self._trees:
          _trees.copy_structure(tree, self._file)
        if note is not None:
          self._file[_source.NOTE] = json.dumps(note)
        if made is not None:
          self._file.attrs[_source.MADE] = made
    except BaseException:
      self.discard()
      raise

  @contextlib.contextmanager
  def _drained(self):
    """A context that raises the errors of the output file."""
    try:
      yield
    finally:
      if self._drain.error is not None:
        with self._writing():
          raise self._drain.error

  def write(self, name, value):
    with self._drained():
      with self._writing():
        dataset = self._file.create_dataset(
            name, data=_stored(value),
            dtype=h5py.string_dtype() if value.dtype == object else None)
      if name in self._like:
        _trees.copy_attributes(self._like[name], dataset, without="dtype")
      if value.dtype == _source.BFLOAT16:
        dataset.attrs["dtype"] = "bfloat16"

  def copy(self, source, name):
    dataset = source.datasets[name]
    if dataset.is_virtual or dataset.external:
      # Data of other files.
      self.write(name, source.read(name))
    else:
      with self._drained():
        _trees.copy_object(dataset, self._file, name)

  def _finish(self):
    with self._drained():
      for tree in self._trees:
        _trees.copy_hard_links(tree, self._file)
      self._file.close()
    self._drain.close()
    return [self._name]

  def discard(self):
    for file in self._file, self._drain:
      with contextlib.suppress(Exception):
        if file is not None:
          file.close()
    super().discard()


class H5Source(_source.Source):
  """An HDF5 file of variables, as Keras writes it.

  Attributes:
    trees: [Tree] of its files.
    datasets: {name of a variable: dataset}.
  """
  kind = "HDF5"
  Sink = H5Sink
  endings: tuple[str, ...] = (".h5", ".hdf5")
  ending = ".weights.h5"

  def __init__(self, path):
    super().__init__(path)
    self._open(h5py.File(path, "r"))

  def _open(self, file):
    """Reads the structure of an `h5py.File`."""
    self._file = file
    tree = _trees.tree_of(file)
    self.trees = [tree]
    self.datasets = tree.datasets
    note = self.datasets.pop(_source.NOTE, None)
    self.specs = {name: _source.Spec(dataset.shape, _dtype(dataset))
                  for name, dataset in self.datasets.items()}
    if note is not None:
      self.note = _source.note_of(note[()], self.specs)
      del tree.groups[os.path.dirname(_source.NOTE)]
    self._optimizers = optimizers(self.specs, self.datasets)

  def moving_statistics(self):
    # Keras's files have the names of layers and the numbers of variables.
    numbers = collections.defaultdict(list)
    for name, dataset in self.datasets.items():
      match = re.fullmatch(r"(?:.*/)?([^/]+)/vars/(\d+)", name)
      if (match and not self._is_optimizer_state(name) and
          any(_BATCH_NORM.search(str(layer)) for layer in (
              match[1], dataset.parent.attrs.get("name", "")))):
        numbers[os.path.dirname(name)].append(int(match[2]))
    # Scale and offset come first, if there are any.
    return sorted([*super().moving_statistics(), *(
        f"{group}/{i}" for group, of_layer in numbers.items()
        for i in sorted(of_layer)[-2:])])

  def _is_optimizer_state(self, name):
    return name.startswith(self._optimizers)

  def _read(self, name):
    value = np.empty(*self.specs[name])
    if value.size:
      self.datasets[name].read_direct(_stored(value))
    return value

  def close(self):
    self._file.close()


def _dtype(dataset):
  # HDF5 has no bfloat16. Keras stores its bytes, and an attribute.
  name = dataset.attrs.get("dtype")
  return (_source.BFLOAT16 if name == "bfloat16" else
          dataset.dtype.newbyteorder("="))


def _stored(array):
  return array.view("V2") if array.dtype == _source.BFLOAT16 else array


def optimizers(specs, datasets):
  """The groups of optimizers.

  That of a compiled model is "optimizer" in Keras 3, "optimizer_weights" in
  older files. For others, a file has neither classes nor what kinds of objects
  there are. The first variable of an optimizer is its count of steps, an
  integer. A layer may have one, too, so the name must be that of an optimizer:
  of the attribute or the list that holds it, or its own.

  Args:
    specs: {name of a variable: Spec}.
    datasets: {name of a variable: dataset}.

  Returns:
    A tuple of names, with a slash at their ends.
  """
  found = ["optimizer/", "optimizer_weights/"]
  for name, spec in specs.items():
    group = name.removesuffix("/vars/0")
    if group != name and spec.shape == () and spec.dtype.kind in "iu":
      names = *group.split("/")[-2:], datasets[name].parent.attrs.get("name")
      if any(_OPTIMIZER.search(str(word)) for word in names):
        found.append(group + "/")
  return tuple(found)
