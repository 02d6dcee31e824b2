"""The settings that all workers of a job give to its servers, as a text.

Servers compare it line by line, in C++: an error tells the first line that
differs. The rest of a line after a tab is told and not compared.
"""

import json
import re
import typing

import tensorflow as tf


class Variable(typing.NamedTuple):
  """A shared variable, as the settings describe it.

  Attributes:
    name: Its name. Names of workers may differ: Keras counts them up.
    shape: A list of integers.
    dtype: A `tf.DType`.
    averaged: Whether it becomes the mean, and takes no outer step.
  """
  name: str
  shape: list
  dtype: tf.DType
  averaged: bool

  @property
  def _role(self):
    return "averaged" if self.averaged else "stepped"

  def write(self):
    return (f"{self.dtype.name} {json.dumps(self.shape)}, {self._role}"
            f"\t({json.dumps(self.name)})")

  @classmethod
  def read(cls, text):
    fact, name = text.split("\t")
    of, role = fact.rsplit(", ", 1)
    dtype, shape = of.split(" ", 1)
    return cls(json.loads(name[1:-1]), json.loads(shape), tf.as_dtype(dtype),
               role == "averaged")


class Settings(typing.NamedTuple):
  """What all workers of a job have in common.

  Attributes:
    rule: The name of the class.
    servers: The number of servers.
    num_workers: The number of workers.
    learning_rate: The outer learning rate.
    momentum: The outer momentum.
    weight: The rule of weights.
    dtype: Of the codes that travel, or None.
    variables: A list of Variables: those that take outer steps come first.
    fragment: (its index, the number of fragments), of which each has rounds of
      its own.
  """
  rule: str
  servers: int
  num_workers: int
  learning_rate: float
  momentum: float
  weight: str
  dtype: typing.Optional[str]
  variables: list
  fragment: tuple = (0, 1)

  def write(self, index):
    """The text for the server of that index."""
    i, fragments = self.fragment
    return "\n".join([
        f"class = {self.rule}" + (
            f", fragment {i} of {fragments}" if fragments > 1 else ""),
        f"number of servers = {self.servers}",
        # A server has one place: not two, and not another one of a worker that
        # lists the servers in another order.
        f"place in the list of servers = {index}",
        f"num_workers = {self.num_workers}",
        f"outer_learning_rate = {self.learning_rate!r}",
        f"outer_momentum = {self.momentum!r}", f"weight = {self.weight!r}",
        f"dtype = {self.dtype!r}",
        f"number of variables = {len(self.variables)}",
        *(f"variable {i} = {v.write()}" for i, v in enumerate(self.variables))])

  @classmethod
  def read(cls, text):
    """(Settings, index) of a text."""
    (rule, servers, index, workers, rate, momentum, weight, dtype, _,
     *variables) = [line.split(" = ", 1)[1] for line in text.split("\n")]
    rule, *fragment = re.split(", fragment | of ", rule)
    return cls(rule, int(servers), int(workers), float(rate), float(momentum),
               weight.strip("'"),
               None if dtype == "None" else dtype.strip("'"),
               [Variable.read(v) for v in variables],
               tuple(map(int, fragment)) or (0, 1)), int(index)


def name_of(job, fragment):
  """The name that a fragment of a job has on the servers.

  That of the first one is the name of the job. So the servers refuse workers
  that differ in their number of fragments.
  """
  return f"{job}/{fragment}" if fragment else job
