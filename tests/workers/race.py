"""Judges from an independent log whether a gate admitted a stale update.

A worker that reads weights, asks the gate, and changes the weights logs the
time of each on the machine's clock. An update is a violation if more other
updates than the limit were surely admitted before it asked, and had surely not
changed the weights when it read them.
"""

import time
import typing

import numpy as np


class Entry(typing.NamedTuple):
  """Times of one admitted update, in nanoseconds."""
  read: int  # The weights were read by then.
  asked: int  # The gate was asked after that.
  admitted: int  # It had admitted the update by then.
  changed: int  # The weights were changed after that.


def lacking(log):
  """For each update, how many others its weights surely lacked."""
  log = np.array(log, np.int64).reshape(-1, len(Entry._fields))
  # An update that had changed the weights had been admitted before.
  admitted = np.searchsorted(np.sort(log[:, 2]), log[:, 1], side="left")
  changed = np.searchsorted(np.sort(log[:, 3]), log[:, 0], side="right")
  return admitted - changed


now = time.monotonic_ns
