"""The names of the slots of averages in files."""

import weakref

SLOT = "ExponentialMovingAverage"

# {a checkpoint that is being restored: {node of a slot: names of all slots of
# its optimizer}}.
_names: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _saved_names(position):
  """The names of all slots of the optimizer that has a slot in a checkpoint.

  Args:
    position: The CheckpointPosition of the slot.

  Returns:
    A set of strings.
  """
  names = _names.get(position.checkpoint)
  if names is None:
    names = _names[position.checkpoint] = {}
    for node in position.checkpoint.object_graph_proto.nodes:
      of_node = {slot.slot_name for slot in node.slot_variables}
      names.update((slot.slot_variable_node_id, of_node)
                   for slot in node.slot_variables)
  return names.get(position.proto_id, set())


def numbered(decay):
  """The name of averages with their decay."""
  return f"{SLOT}_{decay}"


def slot_of(name, position, decays, slots):
  """The slot for averages that a `tf.train.Checkpoint` calls `name`, or None.

  Args:
    name: A string.
    position: The CheckpointPosition of the averages of a variable.
    decays: The decays of the optimizer.
    slots: For each, the name of the slots that hold its averages.
  """
  slot_of_name = dict(zip(map(numbered, decays), slots))
  if name != SLOT:
    return slot_of_name.get(name)
  # One decay has no number. Earlier versions gave the first of several none.
  saved = _saved_names(position)
  if numbered(decays[0]) not in saved:
    return slots[0]
  if slot_of_name.keys() <= saved:
    return None
  raise another_first_decay(decays, name)


def another_first_decay(decays, name):
  return ValueError(
      f"`average_decay` must begin with the decay of '{name}' in the "
      f"checkpoint, got {decays}: the checkpoint has other averages of "
      f"{decays[0]}. Give the decays in the order of the run that wrote it.")
