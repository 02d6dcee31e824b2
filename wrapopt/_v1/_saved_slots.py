"""The names of the slots of averages in files."""

SLOT = "ExponentialMovingAverage"


def numbered(decay):
  """The name of averages with their decay."""
  return f"{SLOT}_{decay}"


def slot_of(name, decays, slots):
  """The slot for averages that a `tf.train.Checkpoint` calls `name`, or None.

  Args:
    name: A string.
    decays: The decays of the optimizer.
    slots: For each, the name of the slots that hold its averages.
  """
  # One decay has no number.
  return slots[0] if name == SLOT else dict(
      zip(map(numbered, decays), slots)).get(name)


def another_first_decay(decays, name):
  return ValueError(
      f"`average_decay` must begin with the decay of '{name}' in the "
      f"checkpoint, got {decays}: the checkpoint has other averages of "
      f"{decays[0]}. Give the decays in the order of the run that wrote it.")
