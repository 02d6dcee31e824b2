"""Random calls of the raw ops, made from their OpDefs.

A call is plain data: what variables there are, and what each input and
attribute is. It is first made as the op wants it. Then, often, one to three
things of it are spoiled. Names of inputs and attributes tell what they stand
for, as they do to a reader of cc/ops. An op with other names gets variables and
tensors of one shape, which is what most ops want.
"""

import dataclasses
import typing

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import op_def_pb2
from tensorflow.python.client import pywrap_tf_session

from wrapopt import _loader
from wrapopt import _native

FLOATS = [t.as_datatype_enum for t in (tf.half, tf.bfloat16, tf.float32,
                                       tf.float64)]
LOW = FLOATS[:2]
FLOAT, DOUBLE, INT32, INT64, STRING, BOOL, RESOURCE = (
    t.as_datatype_enum for t in (tf.float32, tf.float64, tf.int32, tf.int64,
                                 tf.string, tf.bool, tf.resource))
# What a variable can be of. AssignVariableOp knows no qint16 and no quint16.
DTYPES = [t.as_datatype_enum for t in (
    tf.half, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.int16, tf.int32,
    tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64, tf.bool, tf.complex64,
    tf.complex128, tf.qint8, tf.quint8, tf.qint32)]

ODD_DTYPES = [t.as_datatype_enum for t in (
    tf.dtypes.experimental.float8_e5m2, tf.dtypes.experimental.float8_e4m3fn,
    tf.dtypes.experimental.int4, tf.dtypes.experimental.uint4)]

SHAPES = [(), (), (0,), (1,), (3,), (5,), (17,), (300,), (2, 3), (7, 2), (4, 0),
          (0, 3), (1, 1, 1, 2), (2,) * 6]
NUMBERS = [0., -0., 1., -1., 0.5, np.nan, np.inf, -np.inf, 5e-324, 1e-310,
           1e-40, -1e-40, 1e300, -1e300, 3e38, 7e4, 1 - 2**-53]
INTEGERS = [0, 1, -1, 2, 3, 2**31 - 1, 2**31, -2**31, 2**63 - 1, -2**63]

# Inputs that are no variables, though they are resources.
OTHER_RESOURCES = ("rounds", "ticket", "lock")


def op_defs():
  """{name: OpDef} of all ops of the library."""
  assert _loader
  ops = op_def_pb2.OpList()
  ops.ParseFromString(pywrap_tf_session.TF_GetBuffer(
      pywrap_tf_session.TF_GetAllOpList()))
  return {op.name: op for op in sorted(ops.op, key=lambda op: op.name)
          if op.name.startswith("Wrapopt>")}


@dataclasses.dataclass
class Variable:
  """What an input names."""
  dtype: int
  shape: tuple
  value: typing.Any = None  # An array; None: it is not initialized.
  kind: str = "variable"  # Or "deleted", "table", "iterator".
  device: int = 0
  static: bool = True  # Whether its shape is known to who builds a graph.
  anonymous: bool = False  # Whether its handle counts references.
  held: bool = False  # Whether somebody reads it during the call.
  copy_on_read: bool = False


@dataclasses.dataclass
class Rounds:
  """Averaging rounds, to which some workers have come.

  Attributes:
    workers: Their number.
    place: The open round and its generation; (-1, 0) before the first.
    dtypes: Those of the vectors.
    sizes: Their numbers of elements.
    center: Vectors, or None if the center is in variables.
    members: {worker: its vectors}. They had the first turns.
    staged: The same, of those that have the next turns.
    offered: A center that CENTRAL has sent for place OFFERED, or None.
    closed: Whether the round is closed, if it has members.
  """
  workers: int
  place: tuple
  dtypes: list
  sizes: list
  center: typing.Any
  members: dict
  staged: dict
  offered: typing.Any
  closed: bool

  @property
  def is_closed(self):
    return bool(self.closed and self.members)

  @property
  def alive(self):
    """{worker: turn}."""
    return {w: len(self.members) + 1 + i for i, w in enumerate(self.staged)}

  @property
  def newest(self):
    return len(self.members) + len(self.staged) or (0 if self.place[1] else -1)

  def known(self, worker=None):
    """The lead's answer to a worker."""
    alive = self.alive
    numbers = [*self.place, int(self.is_closed), alive.get(worker, -1),
               self.newest, *alive.values()]
    return [" ".join(map(str, numbers)), *sorted(self.members)]


CENTRAL, OFFERED = "center", (5, 9)


@dataclasses.dataclass
class Case:
  """A call of an op, which is made once or twice."""
  seed: int
  op: str
  mode: str
  variables: list = dataclasses.field(default_factory=list)
  # {argument: list of indices of variables, or of arrays}
  inputs: dict = dataclasses.field(default_factory=dict)
  attrs: dict = dataclasses.field(default_factory=dict)
  rounds: typing.Any = None
  bundle: typing.Any = None  # How "variables" are one tensor, if they are.
  hidden: bool = False  # Whether shapes of tensors are known only at run time.
  calls: int = 1
  spoiled: list = dataclasses.field(default_factory=list)


def is_list(arg):
  return bool(arg.number_attr or arg.type_list_attr)


def is_variable(arg):
  return arg.is_ref or (arg.type == RESOURCE and
                        arg.name not in OTHER_RESOURCES)


def family(op):
  """The op's name without what makes it an op of ref variables."""
  return op.removeprefix("Wrapopt>").removesuffix("Ref")


def rule_of(case):
  """The rule that an op applies, or None."""
  name = case.attrs.get("rule")
  rule = _native.rules().get(name)
  return (name, rule) if rule is not None and rule.is_update else None


def numpy_dtype(dtype):
  return tf.as_dtype(dtype).as_numpy_dtype


def array(rng, dtype, shape, low=-2., high=2.):
  """Numbers of a dtype, none of them near zero unless it is zero."""
  dtype = tf.as_dtype(dtype)
  if dtype == tf.string:
    return np.array(rng.integers(0, 9, shape).astype(str).astype(object))
  if dtype == tf.bool:
    return np.asarray(rng.integers(0, 2, shape)).astype(bool)
  if dtype.is_floating:
    # Eighths: sums of gradients of one row are exact.
    x = rng.integers(round(8 * low), round(8 * high) + 1, shape) / 8
    return np.asarray(x).astype(dtype.as_numpy_dtype)
  if dtype.is_complex:
    return np.asarray(rng.normal(size=shape) + 1j).astype(dtype.as_numpy_dtype)
  if dtype.is_quantized:
    # As integers of that size: who makes the tensor casts their bits.
    return np.asarray(rng.integers(0, 100, shape)).astype(
        f"{'u' if 'u' in dtype.name else ''}int{8 * dtype.size}")
  return np.asarray(rng.integers(0, 100, shape)).astype(dtype.as_numpy_dtype)


class _Maker:
  """Makes a case as its op wants it."""

  def __init__(self, op_def, case, rng):
    self.op, self.case, self.rng = op_def, case, rng
    self.names = {a.name for a in op_def.input_arg}
    self._attrs()
    self._shapes()
    self._inputs()

  def _pick(self, options):
    return options[int(self.rng.integers(len(options)))]

  # Attributes.

  def _allowed(self, attr):
    allowed = attr.allowed_values.list.type
    return [t for t in DTYPES if t in allowed or not allowed]

  def _attrs(self):
    rng, attrs = self.rng, self.case.attrs
    by_name = {a.name: a for a in self.op.attr}
    self.n = n = (int(rng.integers(1, 4))
                  if {"N", "shared_names"} & by_name.keys() else 1)
    self.k = int(rng.integers(0, 3))
    if "NK" in by_name:
      self.k = max(self.k, by_name["NK"].minimum)
    for attr in self.op.attr:
      if attr.type == "string":
        attrs[attr.name] = attr.default_value.s.decode()
      if attr.name == "rule":
        attrs["rule"] = self._pick([name for name, rule in
                                    _native.rules().items() if rule.is_update])
      elif attr.name == "shared_name":
        attrs[attr.name] = f"fuzz {self.case.seed}"
      elif attr.name == "shared_names":
        attrs.update(containers=[""] * n, dtypes=[FLOAT] * n,
                     shapes=[[i] for i in range(n)],
                     shared_names=[f"fuzz {i}" for i in range(n)])
    self.rule = rule_of(self.case)
    # The rows of lists that consist of rows of N.
    self.rows = {"targets": int(rng.integers(1, 3)),
                 "sources": int(rng.integers(0, 3)), "tensors": 0}
    self.rows["tensors"] = int(rng.integers(not self.rows["sources"], 2))
    lazy = bool(rng.integers(2)) or by_name.get("NL") and by_name["NL"].minimum
    sparse = bool(rng.integers(2))
    if self.rule and (self.rule[1].all_rows or not sparse):
      lazy = False
    numbers = {"N": n, "NK": n * self.k, "NL": n * self.k * bool(lazy),
               "NI": n * sparse, "NT": n * self.rows["targets"],
               "NS": n * self.rows["sources"]}
    main = None
    for attr in self.op.attr:
      if attr.type == "type":
        allowed = self._allowed(attr)
        if main is None or attr.name == "I":
          attrs[attr.name] = self._pick(allowed)
          main = attrs[attr.name] if main is None else main
        else:  # That of the variables, or float if theirs is narrower.
          attrs[attr.name] = self._pick(
              [main, FLOAT] if main in LOW else [main])
      elif attr.type == "int":
        least = attr.minimum if attr.has_minimum else 0
        value = numbers.get(attr.name, int(rng.integers(least, least + 3)))
        attrs[attr.name] = value
      elif attr.type == "bool":
        attrs[attr.name] = bool(rng.integers(2))
      elif attr.type == "float":
        attrs[attr.name] = 0.0
    if "value" in attrs:
      attrs["value"] = int(rng.integers(2))
    if "num_workers" in by_name:
      attrs.update(sizes=[3, 0], dtypes=[self._pick([FLOAT, DOUBLE])] * 2)
    self.main = main
    self.lists = []  # What each of the op's "variables" is: (list, dtype).
    if {"variables", "NK"} <= self.names | by_name.keys():
      self.lists = self._lists()
      attrs["NV"] = len(self.lists)
      if "NV" in by_name and rng.integers(2) and self.case.mode != "jit":
        self.case.bundle = "vector"
    self.row_dtypes = {}
    if self.lists:
      self.row_dtypes["variables"] = [dtype for _, dtype in self.lists]
    for arg in self.op.input_arg:
      rows = self.rows.get(arg.name)
      if rows is not None and main is not None:
        self.row_dtypes[arg.name] = [
            dtype for _ in range(rows) for dtype in
            [self._pick([main, FLOAT] if main in LOW else [main])] * n]
      if arg.type_list_attr:
        self.row_dtypes.setdefault(arg.name, [
            self._pick(self._allowed(by_name[arg.type_list_attr]))
            for _ in range(int(rng.integers(0, 4)))])
        attrs[arg.type_list_attr] = self.row_dtypes[arg.name]

  def _lists(self):
    attrs, n = self.case.attrs, self.n
    shadows = [("shadows", attrs["S"])] * n * self.k
    if self.rule is None:
      return shadows + [("values", attrs["T"])] * n
    return ([(s, attrs["T"]) for s in self.rule[1].states for _ in range(n)] +
            shadows + [("log_decays", DOUBLE)] * attrs.get("NL", 0))

  # Shapes of the N variables.

  def _shapes(self):
    self.has_rows = "log_decays" in self.names or bool(
        self.case.attrs.get("NI"))
    options = [s for s in SHAPES if s or not self.has_rows]
    self.shapes = [self._pick(options) for _ in range(self.n)]
    rows = [s[0] if s else 1 for s in self.shapes]
    self.indices = []
    for r in rows:
      count = int(self.rng.integers(0, 6)) if r else 0
      self.indices.append(self.rng.integers(0, max(r, 1), count))
    dtypes = [self.main or self._pick(DTYPES) for _ in range(self.n)]
    self.dtypes = dtypes

  # Inputs.

  def _count(self, arg):
    if arg.number_attr:
      return self.case.attrs[arg.number_attr]
    if arg.type_list_attr:
      return len(self.case.attrs[arg.type_list_attr])
    return 1

  def _dtype(self, arg, position):
    if arg.type_list_attr or arg.name in self.row_dtypes:
      return self.row_dtypes[arg.name][position]
    if arg.type_attr:
      return self.case.attrs[arg.type_attr]
    if arg.type != RESOURCE and arg.type:
      return arg.type
    return {"shadows": self.case.attrs.get("S"), "log_decays": DOUBLE,
            "step": self._step, "stale_counter": FLOAT,
            "histogram": INT64}.get(arg.name,
                                    self.dtypes[position % self.n])

  def _add(self, dtype, shape, value):
    rng = self.rng
    self.case.variables.append(Variable(
        dtype, tuple(shape), value, static=bool(rng.random() < 0.7),
        anonymous=bool(rng.integers(2)), held=bool(rng.random() < 0.2),
        copy_on_read=bool(rng.random() < 0.1)))
    return len(self.case.variables) - 1

  def _variable(self, arg, position):
    name, dtype = (self.lists[position] if self.lists else
                   (arg.name, self._dtype(arg, position)))
    shape = self.shapes[position % self.n]
    low, high = (0.25, 2) if name in _not_negative(self.rule) else (-2, 2)
    if name == "log_decays":
      return self._add(dtype, (shape[0] + 2,), self._log_decays(shape[0]))
    shape = {"step": (), "stale_counter": ()}.get(name, shape)
    if name == "histogram":
      shape = (2, int(self.rng.integers(1, 5)))
    return self._add(dtype, shape, array(self.rng, dtype, shape, low, high))

  def _log_decays(self, rows):
    if self.rng.random() < 0.3:
      return None  # Stands for zeros.
    total = -float(self.rng.integers(0, 3)) * self._pick([0.01, 1, 30, 4999.9])
    sums = self.rng.random(rows) * total
    # The last element is where the value was, which is not known.
    return np.concatenate([sums, [total, 0]])

  def _scalar(self, name):
    rng = self.rng
    if name == "epsilon" and self.rule and "Centered" in self.rule[0]:
      return 50.  # Makes the variance positive.
    return self._pick([0.1, 0.5, 0.9, 0.02 + 0.9 * float(rng.random())])

  def _tensor(self, arg, position):
    rng, name, n = self.rng, arg.name, self.n
    dtype = self._dtype(arg, position)
    shape = self.shapes[position % n]
    if name == "indices":
      return self.indices[position].astype(numpy_dtype(dtype))
    if name == "grad":
      if self.has_rows:
        shape = (len(self.indices[position]), *shape[1:])
      return array(rng, dtype, shape)
    if name == "decays":
      return np.array([self._pick([0., 0.5, 0.9, 0.9999, 1.])
                       for _ in range(self.k)])
    if name == "weights":
      count = self.rows["sources"] + self.rows["tensors"]
      return array(rng, dtype, (count,))
    if name == "rate":
      return np.array(self._pick([0., 0.25, 0.9, 1.]))
    if name == "accept":
      return np.array(bool(rng.random() < 0.8))
    if name == "packed":
      return array(rng, dtype, (sum(int(np.prod(s)) for s in self.shapes),))
    if name == "scalars" and self.rule:
      return np.array([
          float(rng.integers(2)) if s.endswith("?") else self._scalar(s)
          for s in self.rule[1].scalars])
    if name == "timeout_secs":
      return np.array(self._pick([0.001, 0.02, 5., np.inf]))
    if name in ("recorded", "limit"):
      return np.array(self._pick([0, 3, 1, 50]), np.int64)
    if name == "shared_name":
      return np.array("no rounds", object)
    if name == "token":  # All negative ones stand for none.
      return np.array(self._pick([0, 7, 7, 2**63 - 1, -1, -2**63]), np.int64)
    if name == "code":  # Others are errors.
      return np.array(0, np.int32)
    if self.case.rounds:
      return self._of_rounds(name, position, dtype)
    if dtype == DOUBLE and not is_list(arg):
      return np.array(self._scalar(name))
    if is_list(arg) and name != "values" or arg.type_attr:
      return array(rng, dtype, shape)
    return array(rng, dtype, shape if is_list(arg) else ())

  def _of_rounds(self, name, position, dtype):
    """A tensor for an op of averaging rounds."""
    rng, rounds = self.rng, self.case.rounds
    n = len(rounds.sizes)
    if name == "worker":
      some = list(rounds.staged) if rng.random() < 0.8 else []
      return np.array(self._pick(some or ["w0", "w1", "w2"][:rounds.workers])
                      if "from_generation" not in self.names else CENTRAL,
                      object)
    if name == "known":
      [worker] = self.case.inputs.get("worker", [np.array("")])
      return np.array(rounds.known(worker[()]), object)
    if name == "place":
      place = rounds.place
      if "from_generation" in self.names:
        place = OFFERED if rounds.offered else (max(place[0], 0), OFFERED[1])
      elif rng.random() < 0.1:
        place = (place[0] + self._pick([-1, 1]), place[1])
      return np.array(place, np.int64)
    if name == "values":
      size = rounds.sizes[(self.first + position) % n]
      return array(rng, dtype, (size,))
    numbers = {
        "min_workers": [1, rounds.workers], "most_turns": [0, 1, 9, 9],
        "turn_secs": [5., np.inf], "grace_secs": [0., 0.01, np.inf],
        "process": [0], "weight": [1., 0.5, 3.],
        "count": [n] if "index" not in self.names else [1, n - self.first],
        "first": [self.first], "from_generation": [rounds.place[1]],
        "learning_rate": [1., 0.5], "momentum": [0., 0.9],
        "stepped": [0, n], "index": [self.first],
        "turn": [-1, *rounds.alive.values()], "job": [0, 5],
        "resumes": [False, True]}
    return np.array(self._pick(numbers[name]), numpy_dtype(dtype))

  def _rounds(self):
    rng, attrs, op = self.rng, self.case.attrs, family(self.op.name)
    sizes = [self._pick([0, 1, 3, 17]) for _ in range(rng.integers(1, 4))]
    dtypes = [self._pick([FLOAT, DOUBLE]) for _ in sizes]
    has_center = bool(rng.integers(2)) or op in (
        "AveragingOuterStep", "AveragingCenter")
    self.first = int(rng.integers(len(sizes)))
    if op == "AveragingMean":
      has_center = False
      sizes, dtypes = self._of_mean()
    if op == "AveragingCenter":
      if attrs["T"] not in (FLOAT, DOUBLE):  # There are no codes.
        attrs["T"] = FLOAT
      dtypes[self.first:] = [attrs["T"]] * len(dtypes[self.first:])
    if op == "AveragingStage":
      self.row_dtypes["values"] = attrs["T"] = [
          self._value_dtype(t) for t in dtypes[self.first:]]
    vectors = lambda: [array(rng, self._value_dtype(t), (size,))
                       for t, size in zip(dtypes, sizes)]
    workers = int(rng.integers(1, 4))
    is_new = rng.random() < 0.1 and not has_center
    came = {f"w{w}": rng.random() for w in range(workers)}
    ends = "learning_rate" in self.names or op == "AveragingMean"
    restores = "from_generation" in self.names
    center = [array(rng, t, (size,)) for t, size in zip(dtypes, sizes)]
    self.case.rounds = Rounds(
        workers, (-1, 0) if is_new else (int(rng.integers(3)), 1), dtypes,
        sizes, center if has_center else None,
        {w: vectors() for w, x in came.items() if x < (0.8 if ends else 0.4)},
        {w: vectors() for w, x in came.items() if x > (0.9 if ends else 0.6)},
        center if has_center and restores and rng.integers(2) else None,
        bool(rng.random() < (0.9 if ends else 0.2)))

  def _value_dtype(self, dtype):
    return self._pick([FLOAT, FLOAT, *LOW]) if dtype == FLOAT else dtype

  def _of_mean(self):
    """Makes the variables of AveragingMean: the sizes and dtypes of vectors."""
    attrs = self.case.attrs
    attrs["sizes"] = [int(self.rng.integers(1, 3))
                      for _ in range(self.rng.integers(1, 4))]
    of = [self._pick(FLOATS) for _ in attrs["sizes"]]
    self.dtypes = [t for t, n in zip(of, attrs["sizes"]) for _ in range(n)]
    shapes = [[self._pick(SHAPES) for _ in range(n)] for n in attrs["sizes"]]
    self.shapes = [s for group in shapes for s in group]
    for _ in range(self.rng.integers(3)):
      self.shapes.append(())
      self.dtypes.append(self._pick([INT32, INT64]))
    self.n = len(self.shapes)
    in_refs = self.case.mode == "ref-graph"
    attrs["N"] = 0 if in_refs else self.n
    self.row_dtypes["refs"] = attrs["T"] = self.dtypes if in_refs else []
    return ([sum(int(np.prod(s)) for s in group) for group in shapes],
            [DOUBLE if t == DOUBLE else FLOAT for t in of])

  def _inputs(self):
    self._step = self._pick([INT32, INT64])
    if "rounds" in self.names:
      self._rounds()
    for arg in self.op.input_arg:
      if is_variable(arg):
        made = [self._variable(arg, i) for i in range(self._count(arg))]
      elif arg.name in OTHER_RESOURCES:
        made = [arg.name]
      else:
        made = [self._tensor(arg, i) for i in range(self._count(arg))]
      self.case.inputs[arg.name] = made
    # A target may be a source of its own mean.
    targets, sources = (self.case.inputs.get(x) for x in ("targets", "sources"))
    if targets and sources and self.rng.integers(2):
      for i in range(self.n):
        if self._same(targets[i], sources[i]):
          sources[i] = targets[i]

  def _same(self, a, b):
    of = self.case.variables
    return (of[a].dtype, of[a].shape) == (of[b].dtype, of[b].shape)

def _not_negative(rule):
  import numerics  # pylint: disable=g-import-not-at-top
  return numerics.NOT_NEGATIVE.get(rule[0], ()) if rule else ()


class _Spoiler:
  """Spoils one thing of a case, and notes what."""

  def __init__(self, op_def, case, rng):
    self.op, self.case, self.rng = op_def, case, rng
    self.variables = [a.name for a in op_def.input_arg
                      if is_variable(a) and case.inputs[a.name]]
    self.tensors = [a.name for a in op_def.input_arg
                    if not is_variable(a) and a.name not in OTHER_RESOURCES
                    and case.inputs[a.name]]
    self.lists = [a.name for a in op_def.input_arg if is_list(a)]

  def _pick(self, options):
    return options[int(self.rng.integers(len(options)))]

  def once(self):
    ways = [(self.attribute, 1)]
    if self.variables:
      ways += [(self.handle, 4), (self.repeat, 1), (self.contents, 2)]
    if self.tensors:
      ways += [(self.shape, 2), (self.number, 4)]
    if self.lists:
      ways += [(self.length, 1)]
    if self.case.bundle:
      ways += [(self.bundle, 1)]
    if self.case.rounds:
      ways += [(self.state, 2)]
    way = self._pick([w for w, weight in ways for _ in range(weight)])
    note = way()
    if note:
      self.case.spoiled.append(note)

  def _some_variable(self):
    name = self._pick(self.variables)
    position = int(self.rng.integers(len(self.case.inputs[name])))
    index = self.case.inputs[name][position]
    return name, position, index, self.case.variables[index]

  def handle(self):
    name, position, _, variable = self._some_variable()
    how = self._pick(["uninitialized", "uninitialized", "deleted", "table",
                      "iterator", "device", "shape", "dtype"])
    if how == "uninitialized":
      variable.value = None
    elif how in ("deleted", "table", "iterator"):
      variable.kind, variable.value = how, None
    elif how == "device":
      variable.device = 1
    elif how == "shape":
      variable.shape = self._pick(
          [s for s in SHAPES if s != variable.shape] + [(1,) * 12, (0, 2**40)])
      self._give_value(variable)
    else:
      others = DTYPES + [STRING] + ODD_DTYPES * (self.case.mode != "ref-graph")
      variable.dtype = self._pick([t for t in others if t != variable.dtype])
      self._give_value(variable)
    return f"{name}[{position}] {how}"

  def _give_value(self, variable):
    if variable.kind == "variable":  # No table, and not deleted.
      variable.value = array(self.rng, variable.dtype, variable.shape)

  def repeat(self):
    name, position, *_ = self._some_variable()
    other, at, index, _ = self._some_variable()
    self.case.inputs[name][position] = index
    return f"{name}[{position}] is {other}[{at}]"

  def contents(self):
    """Numbers that are hard to compute with, in a variable."""
    name, position, _, variable = self._some_variable()
    variable.value = self._with_numbers(variable.value)
    return f"{name}[{position}] has odd numbers"

  def _with_numbers(self, value):
    value = None if value is None else np.array(value)
    if value is None or value.size == 0 or value.dtype == object:
      return value
    at = int(self.rng.integers(value.size))
    with np.errstate(all="ignore"):
      if value.dtype.kind in "iu":
        info = np.iinfo(value.dtype)
        number = min(max(self._pick(INTEGERS), info.min), info.max)
      else:
        number = self._pick(NUMBERS)
      value.reshape(-1)[at] = np.asarray(number).astype(value.dtype)
    return value

  def _some_tensor(self):
    name = self._pick(self.tensors)
    position = int(self.rng.integers(len(self.case.inputs[name])))
    return name, position, self.case.inputs[name][position]

  def shape(self):
    name, position, old = self._some_tensor()
    ways = [lambda x: x[None], lambda x: x[..., None], lambda x: x.reshape(-1),
            lambda x: np.broadcast_to(x, (0, *x.shape)),
            lambda x: x.reshape((1,) * 12 + x.shape),
            lambda x: np.concatenate([x.reshape(-1)] * 2),
            lambda x: x[:-1] if x.ndim else x[None], lambda x: x.sum()
            if x.dtype.kind == "f" else x.reshape(-1)[:0]]
    new = np.array(self._pick(ways)(old), old.dtype)
    self.case.inputs[name][position] = new
    return new.shape != old.shape and (
        f"{name}[{position}] {old.shape} -> {new.shape}")

  def number(self):
    name, position, old = self._some_tensor()
    if name == "known" and old.ndim == 1 and old.size:
      new = self._known(old)
    elif old.dtype == object:
      new = np.array(self._pick(["", "nobody", "w2", "x" * 10000]), object)
      new = np.broadcast_to(new, old.shape).copy()
    elif old.dtype == bool:
      new = ~old
    else:
      new = self._with_numbers(old)
    self.case.inputs[name][position] = np.array(new, old.dtype)
    return f"{name}[{position}] has odd numbers"

  def length(self):
    name = self._pick(self.lists)
    some = self.case.inputs[name]
    if some and self.rng.integers(2):
      some.pop()
    elif some:
      some.append(some[0])
    return f"{name} has {len(some)}"

  def bundle(self):
    self.case.bundle = self._pick(["scalar", "matrix", "empty"])
    return f"variables: a {self.case.bundle}"

  def state(self):
    rounds = self.case.rounds
    how = self._pick(["round", "none", "closed"])
    if how == "round" and rounds.place[1]:
      rounds.place = (self._pick([0, 7, 2**62]), 1)
    elif how == "closed":
      rounds.closed = not rounds.closed
    else:
      rounds.members, rounds.staged = {}, {}
    return f"rounds: {how}"

  def _known(self, old):
    """What rounds have told, changed in one place."""
    numbers, names = str(old[0]).split(" "), list(old[1:])
    at = int(self.rng.integers(len(numbers)))
    how = self.rng.integers(5)
    if how < 3:
      numbers[at] = str(self._pick([*INTEGERS, 2**63, "", "x"]))
    elif how == 3:
      names = self._pick([names[1:], [*names, "w0"], ["nobody"]])
    else:
      numbers = self._pick([numbers[at:], numbers * 2])
    return [" ".join(numbers), *names]

  def attribute(self):
    attrs = [a for a in self.op.attr]
    if not attrs:
      return None
    attr = self._pick(attrs)
    old = self.case.attrs[attr.name]
    if attr.type == "type":
      new = self._pick(DTYPES + [STRING, RESOURCE])
    elif attr.type == "int":
      new = self._pick([0, 1, -1, old + 1, 7, 2**31 - 1, 2**62])
    elif attr.type == "bool":
      new = not old
    elif attr.type == "float":
      new = self._pick([1.5, -1.5, float("nan"), float("inf")])
    elif attr.type == "string":
      new = self._pick(["", "Ema", "WeightedSum", "nonsense", "\0", "x" * 5000])
    elif attr.type == "list(type)":
      new = [self._pick(FLOATS + [INT32]) for _ in range(len(old))]
    elif attr.type == "list(int)":
      new = self._pick([old[1:], [*old, 1], [-1] * len(old), [2**62] * 2])
    elif attr.type == "list(string)":
      new = self._pick([old[1:], [*old, "more"], [""] * len(old)])
    elif attr.type == "list(shape)":
      new = old[1:]
    else:
      return None
    self.case.attrs[attr.name] = new
    return f"{attr.name} = {new!r:.40} instead of {old!r:.40}"


def modes_of(op_def):
  """The modes in which an op can run, each as often as it shall."""
  modes = ["eager"] * 6 + ["function"] * 3 + ["graph"] * 3
  if op_def.name == "Wrapopt>AveragingMean":
    return modes + ["ref-graph"] * 3  # Its refs may be none.
  if any(a.is_ref for a in op_def.input_arg):
    return ["ref-graph"]
  # TensorFlow may crash when it compiles a function of strings.
  if any(a.type == STRING for a in op_def.input_arg):
    return modes
  return modes + ["jit"] * 2


def make(seed, op=None, mode=None):
  """The case of a number.

  Args:
    seed: The number.
    op: A part of the names of the ops to choose from.
    mode: The mode, if it is one of the op's.

  Returns:
    A Case.
  """
  rng = np.random.default_rng(seed)
  ops = [d for name, d in op_defs_once().items() if op is None or op in name]
  op_def = ops[int(rng.integers(len(ops)))]
  modes = modes_of(op_def)
  chosen = modes[int(rng.integers(len(modes)))]
  case = Case(seed, op_def.name, mode if mode in modes else chosen)
  _Maker(op_def, case, rng)
  case.hidden = bool(rng.integers(2))
  case.calls = 1 + int(rng.random() < 0.3)
  for _ in range([0, 0, 0, 1, 1, 1, 2, 3][int(rng.integers(8))]):
    _Spoiler(op_def, case, rng).once()
  return case


_op_defs = {}


def op_defs_once():
  if not _op_defs:
    _op_defs.update(op_defs())
  return _op_defs
