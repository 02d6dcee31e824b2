"""Sharded weights of Keras: several HDF5 files, and a JSON file of them.

They are only read.
"""

import os

from wrapopt.checkpoints import _files
from wrapopt.checkpoints import _h5
from wrapopt.checkpoints import _source


class ShardedSource(_h5.H5Source):
  """Sharded weights of Keras: several HDF5 files, and a JSON file of them."""
  kind = "sharded HDF5"
  endings = ("weights.json",)

  @classmethod
  def parts(cls, path):
    return _shards_of(path)

  @classmethod
  def output(cls):
    return _h5.H5Source

  def __init__(self, path):
    _source.Source.__init__(self, path)
    self._shards = []
    try:
      for name in _shards_of(path):
        shard = os.path.join(os.path.dirname(path), name)
        with _files.naming(
            path, f"names the shard {shard}, which cannot be read"):
          self._shards.append(_h5.H5Source(shard))
    except BaseException:
      self.close()
      raise
    self.trees = [tree for shard in self._shards for tree in shard.trees]
    self._of = {name: shard for shard in self._shards for name in shard.specs}
    self.datasets = {name: shard.datasets[name]
                     for name, shard in self._of.items()}
    self.specs = {name: shard.specs[name] for name, shard in self._of.items()}
    self._optimizers = _h5.optimizers(self.specs, self.datasets)

  def check_unchanged(self):
    super().check_unchanged()
    for shard in self._shards:
      shard.check_unchanged()

  def read(self, name):
    return self._of[name].read(name)

  def close(self):
    for shard in self._shards:
      shard.close()


def _shards_of(path):
  """The names of the HDF5 files of sharded weights: a sorted list."""
  found = _source.weight_map(
      path, "model.save_weights writes it for sharded weights")
  return sorted({name for names in found.values() for name in (
      [names] if isinstance(names, str) else names)})
