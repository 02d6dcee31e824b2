"""The loop that measures the streaming limit of the benchmarks."""

import gc

import numpy as np
import pytest

from numerics import FLOAT
from wrapopt.bench.stream_limit import StreamLimit


@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("reads", [1, 2])
def test_adds(threads, reads):
  # The second spans several ranges, and ends within a block.
  sizes = [3, 200_001, 0, 7]
  read = [[np.arange(r, size + r, dtype=FLOAT) for size in sizes]
          for r in range(reads)]
  written = [[np.full(size, k, FLOAT) for size in sizes] for k in range(3)]
  written[2][0].flags.writeable = False  # As a tensor's is.
  limit = StreamLimit(read, written)
  assert limit.bytes == 200_011 * 4 * (reads + 2 * 3)
  for _ in range(2):
    assert 0 < limit.run(threads=threads) < 60
  for k, row in enumerate(written):
    for i, array in enumerate(row):
      np.testing.assert_array_equal(array, 2 * sum(x[i] for x in read) + k)


def test_keeps_its_arrays():
  limit = StreamLimit(
      [[np.ones(10_000_000, FLOAT)]], [[np.ones(10_000_000, FLOAT)]])
  gc.collect()
  assert limit.run(2) > 0


def test_of_nothing():
  assert StreamLimit([[]], [[]]).run(2) > 0
  assert StreamLimit([[np.ones(3, FLOAT)]], []).bytes == 12
