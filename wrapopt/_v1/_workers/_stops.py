"""Stops the rounds of other workers before a session writes to the centers."""

import tensorflow as tf

from wrapopt._v1._graphs import _initial_value

tf1 = tf.compat.v1


def stop_before_writes(stop, centers):
  """Runs an operation before centers are initialized or restored.

  Args:
    stop: The operation.
    centers: A VariableMap, whose values in the graph are the centers.
  """
  graph = tf1.get_default_graph()
  for variable in centers.in_graph():
    _run_first(stop, [_initial_value.initializer_of(centers[variable])])
  _run_first(stop, _restores(graph))
  savers = tf1.get_collection_ref(tf1.GraphKeys.SAVERS)
  if not savers:
    # The session makes its saver later, unless there is one.
    savers.append(_Saver(sharded=True, allow_empty=True, defer_build=True))
  if isinstance(savers[0], _Saver):
    savers[0].stops.append(stop)


class _Saver(tf.compat.v1.train.Saver):
  """The default saver of a session. It stops rounds before it restores."""

  def __init__(self, **kwargs):
    super().__init__(**kwargs)
    self.stops = []

  def build(self):
    known = set(_restores(tf1.get_default_graph()))
    super().build()
    for stop in self.stops:
      _run_first(stop, [op for op in _restores(tf1.get_default_graph())
                        if op not in known])


def _restores(graph):
  return [op for op in graph.get_operations() if op.type == "RestoreV2"]


def _run_first(stop, ops):
  for op in ops:
    op._add_control_inputs([stop])
