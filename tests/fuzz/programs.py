"""Random programs that train with wrappers, as hypothesis strategies.

A Program is plain data. `programs_model.py` computes what it must give, and
`programs_code.py` writes it as Python code.
"""

import dataclasses
import itertools
from typing import Any

import hypothesis
from hypothesis import strategies as st

from wrapopt import _composition

CROSS, GATE, ELASTIC, MODEL, MOVING, *_ = V1_WRAPPERS = _composition.NAMES
WORKERS = (ELASTIC, MODEL)
# They train between z and its average x.
PRIMAL, FREE = ("PrimalAverage", _composition.NAMES[5]), (
    "ScheduleFree", _composition.NAMES[6])
BETWEEN = (*PRIMAL, *FREE)
KERAS_WRAPPERS = ("MovingAverage", "SWA", "Lookahead", "LossScale", PRIMAL[0],
                  FREE[0])
# The outermost one: others have no argument for a record.
KERAS_GATE = "DropStaleGradient"
GATES = (GATE, KERAS_GATE)
AVERAGING = ("MovingAverage", "SWA", MOVING, *BETWEEN)

SESSIONS = ("resource", "ref")
MODES = {"keras": ("eager", "function", "fit", "jit"),
         "v1": ("eager", "function", *SESSIONS, "jit")}

# A gradient of this age is dropped; one of a lesser age is not.
LIMIT = 2


@dataclasses.dataclass(frozen=True)
class Variable:
  """A variable to train.

  Attributes:
    shape: Its shape.
    dtype: Its dtype.
    rows: Whether its gradients are sparse.
  """
  shape: tuple[int, ...]
  dtype: str
  rows: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
  """Variables, an optimizer in wrappers, and operations.

  Attributes:
    api: "keras" or "v1".
    mode: One of MODES.
    variables: The variables.
    inner: (name, options) of the inner optimizer, see `programs_model.RULES`.
    chain: (name, options) of each wrapper, the outermost first.
    operations: Tuples of a name and arguments:
      ("steps", (step, ...)): Steps, each (t, trained, lag): the number of its
        gradients; which variables have one; and its lag, which is greater than
        LIMIT if the step must be skipped by a gate or a loss scaling.
      ("rate", x): Another learning rate.
      ("read",): Reads all there is, and compares it.
      ("swap", k, l, inside): A block in which the l-th decay of the k-th
        wrapper that averages is in place. `inside` names what is tried there.
      ("save", how), ("restore", how): To and from a file.
      ("other", order): Restores it in a program that trains these variables
        only, in this order.
      ("seed", k): Calls seed_averages() of such a wrapper.
      ("assign", i, t): Assigns a variable another value.
      ("fail",): A step that raises an error.
      ("threads", steps): Steps, while a thread reads averages.
      ("evaluate", t): Keras's evaluate with averages.
      ("validate", step, data): A step of `fit` with a validation of averages
        of all decays, on a kind of data.
      ("epochs", steps): An epoch of a length that nobody knows before.
      ("freeze", trained): Trains some variables only, and compiles again.
      ("finish",): What `fit` does at its end.
      ("export",): A SavedModel that goes on in TensorFlow 2.
    setting: What the program switches on: "", "flags" or one of SETTINGS.
  """
  api: str
  mode: str
  variables: tuple[Variable, ...]
  inner: tuple[str, dict[str, Any]]
  chain: tuple[tuple[str, dict[str, Any]], ...]
  operations: tuple[tuple[Any, ...], ...]
  setting: str = ""

  @property
  def names(self):
    """The names of the wrappers, the outermost first."""
    return [name for name, _ in self.chain]

  def options(self, name):
    """The options of a wrapper."""
    return dict(self.chain)[name]

  def has(self, *names):
    """Whether one of these is a wrapper."""
    return not set(names).isdisjoint(self.names)

  @property
  def averaging(self):
    """The names of the wrappers that keep averages, the outermost first."""
    return [name for name in self.names if name in AVERAGING]

  @property
  def is_one_pass(self):
    """Whether a native op takes the step of an optimizer of TensorFlow."""
    return (self.has(GATE, MOVING, *BETWEEN) and not self.has(*WORKERS) and
            all(options.get("fused", None) is None
                for _, options in self.chain))

  @property
  def accumulates(self):
    """How many gradients make a step."""
    return self.inner[1].get("accumulate", 1)

  @property
  def between(self):
    """The name of the wrapper that trains between z and x, or None."""
    return next((name for name in self.names if name in BETWEEN), None)

  @property
  def has_slots(self):
    """Whether a file of Keras has state of the inner optimizer, by index."""
    return self.accumulates > 1 or self.inner[0] not in ("SGD", "SGDW")

  @property
  def has_files(self):
    """Whether its state can be saved."""
    # Workers have no files. A Saver takes the checks for other variables.
    return not self.has(*WORKERS) and (
        self.mode not in SESSIONS or self.setting != "numerics")

  @property
  def steps(self):
    """All steps."""
    return [step for name, *rest in self.operations
            if name in ("steps", "threads") for step in rest[0]]


def chains(api, graph):
  """All chains of wrappers, the shortest first."""
  if api == "keras":
    # Nothing twice. A gate must not hold an optimizer that holds others.
    return [chain for n in range(5)
            for chain in itertools.permutations(
                (KERAS_GATE, *KERAS_WRAPPERS), n)
            if KERAS_GATE not in chain[1:] and (
                KERAS_GATE not in chain or "LossScale" not in chain) and
            n - (KERAS_GATE in chain) <= 3 and
            not _has_refused(chain, _composition.REFUSED_IN_KERAS)]
  names = [name for name in V1_WRAPPERS if graph or name not in WORKERS]
  return [chain for n in range(4)
          for chain in itertools.product(names, repeat=n)
          if len(set(chain)) == n and
          not _has_refused(chain, _composition.REFUSED)]


def _has_refused(chain, refused):
  return any(pair in refused for pair in itertools.combinations(chain, 2))


# What TensorFlow and Keras do not do, with or without wrappers: {reason:
# condition}.
LIMITATIONS = {
    "LossScaleOptimizer makes float32 of a half gradient, which Keras cannot "
    "add to a half accumulator": lambda program: (
        program.has("LossScale") and program.accumulates > 1 and
        any(v.dtype in ("float16", "bfloat16") for v in program.variables)),
    "TensorFlow has no kernels for sparse gradients in bfloat16": (
        lambda program: program.api == "v1" and not program.is_one_pass and
        program.inner[0] in ("Adadelta", "Adagrad", "RMSProp") and
        any(v.dtype == "bfloat16" and v.rows for v in program.variables)),
    "XLA has no kernels for these steps of sparse gradients": (
        lambda program: program.api == "v1" and program.mode == "jit" and
        not program.is_one_pass and program.inner[0] not in (
            "Adam", "GradientDescent", "LazyAdam") and any(
                v.rows for v in program.variables)),
    "TensorFlow cannot check bfloat16": (
        lambda program: program.setting == "numerics" and
        any(v.dtype == "bfloat16" for v in program.variables)),
    "Keras adds a bias where it should add an empty gradient": (
        lambda program: program.api == "keras" and program.accumulates > 1 and
        any(v.shape == (0, 3) for v in program.variables)),
    "As in 1.15, a worker starts at the centers, whatever it restored": (
        lambda program: program.setting == "warm" and program.has(*WORKERS)),
    "LossScaleOptimizer makes infinities, where a check finds them": (
        lambda program: program.setting == "numerics" and
        program.has("LossScale")),
    "XLA does not compile Keras's division of a sparse gradient": (
        lambda program: program.api == "keras" and program.mode == "jit" and
        (program.inner[0] in ("Adagrad", "RMSprop") or
         program.has("LossScale")) and
        any(v.rows for v in program.variables)),
}

_CHAINS = {(api, graph): chains(api, graph)
           for api in MODES for graph in (True, False)}
# They are few, since they take no other averages.
_BETWEEN_CHAINS = {api: [chain for chain in _CHAINS[api, False]
                         if set(chain) & set(BETWEEN)] for api in MODES}

_DECAYS = st.sampled_from([0.5, 0.875, 0, 1, 0.99, "power_0", "power_1",
                           "power_6.5"])


_EVERY = st.sampled_from([1, 1, 2, 3])


@st.composite
def _options(draw, name, keep, n):
  """The options of a wrapper.

  Args:
    name: The wrapper.
    keep: Whether `fit` ends with the raw weights.
    n: The number of variables, or None if it cannot choose some of them.
  """
  # All variables, or which of them are averaged.
  chosen = st.none() if n is None else st.one_of(
      st.none(), st.tuples(*[st.booleans()] * n).filter(any))
  if name == MOVING:
    return {"decays": draw(_some_decays()),
            "warm_up": draw(st.booleans()),
            "every": draw(_EVERY), "chosen": draw(chosen),
            "shadow": draw(st.booleans()),
            "fused": draw(st.sampled_from([None, False])),
            "lazy": draw(st.sampled_from([None, False]))}
  if name == "MovingAverage":
    return {"decays": draw(_some_decays()),
            "warm_up": draw(st.booleans()),
            "start": draw(st.integers(0, 3)),
            "every": draw(_EVERY), "chosen": draw(chosen),
            "lazy": draw(st.sampled_from([None, False])),
            "keep": keep,
            "sum": draw(st.booleans())}
  if name in BETWEEN:
    of = ({"decay": draw(st.sampled_from([0.5, 0.875, 0, 1]))}
          if name in PRIMAL else {
              "warm_up": draw(st.integers(0, 3)),
              "power": draw(st.sampled_from([2, 0])),
              "r": draw(st.sampled_from([0, 1]))})
    return {"momentum": draw(st.sampled_from([0.5, 1])), "keep": keep, **of}
  if name == "SWA":
    return {"start": draw(st.integers(0, 3)), "period": draw(st.integers(1, 3)),
            # The number of steps of an epoch, which the others then count.
            "epoch": draw(st.sampled_from([None, 1, 2])) if n is None else None,
            "chosen": draw(chosen),
            "keep": keep,
            "sum": draw(st.booleans())}
  if name == "Lookahead":
    return {"period": draw(st.integers(1, 3)),
            "step": draw(st.sampled_from([0.5, 0, 1, 0.25])),
            "sum": draw(st.booleans())}
  if name == "LossScale":
    return {"scale": 8.0, "growth": draw(st.sampled_from([3, 2000]))}
  if name == GATE:
    return {"policy": draw(st.sampled_from(["drop", "scale"])),
            "fused": draw(st.sampled_from([None, False]))}
  if name == KERAS_GATE:
    return {"policy": draw(st.sampled_from(["drop", "scale"])),
            "sum": draw(st.booleans())}
  if name == MODEL:
    return {"period": draw(st.integers(1, 3)), "early": draw(st.booleans())}
  if name == ELASTIC:
    return {"period": draw(st.integers(1, 3)),
            "rate": draw(st.sampled_from([0.25, 0, 1]))}
  return {}


def _some_decays():
  return st.lists(_DECAYS, min_size=1, max_size=3, unique=True).map(tuple)


_SHAPES = st.sampled_from([(2,), (), (6, 3), (0, 3), (1,)])
_DTYPES = st.sampled_from(["float64"] * 4 + ["float32", "float16", "bfloat16"])


@st.composite
def _variable(draw):
  if draw(st.booleans()):
    return Variable((draw(st.integers(1, 6)), draw(st.integers(1, 2))),
                    draw(_DTYPES), True)
  return Variable(draw(_SHAPES), draw(_DTYPES))


_INNER = {
    "keras": ["SGD", "Momentum", "Nesterov", "Adam", "AdamW", "LazyAdam",
              "Adagrad", "RMSprop", "SGDW", "Adamax", "Adam0"],
    "v1": ["GradientDescent", "Momentum", "Nesterov", "Adam", "LazyAdam",
           "Adagrad", "RMSProp", "Adadelta", "Adam0"],
}
# Those that have an op, and no momentum, in each of these wrappers.
_INNER_OF = {
    "PrimalAverage": [name for name in _INNER["keras"] if name != "LazyAdam"],
    "ScheduleFree": ["SGD", "SGDW", "Adagrad", "RMSprop", "Adam0"],
    PRIMAL[1]: ["GradientDescent", "Adam", "Adam0", "Adagrad"],
    FREE[1]: ["GradientDescent", "Adam0", "Adagrad"],
}

# The settings that a program may switch on, by mode.
#   numerics: TensorFlow checks what each op gives for NaN and infinities. It
#     cannot check ref variables.
#   clusters: XLA compiles what it likes: of a session, by its configuration;
#     of functions, after they were traced.
#   flags: So does XLA, by a file of flags, in a process of its own. It takes
#     the place of some of "clusters".
#   warm: Variables start at the values of a checkpoint.
SETTINGS = {
    mode: (*["numerics"] * (mode != "ref"),
           *["clusters"] * (mode in ("function", "fit", *SESSIONS)),
           *["warm"] * (mode in SESSIONS))
    for modes in MODES.values() for mode in modes}


def programs(api=None, mode=None):
  """Programs of an API and a mode; by default of all."""
  return _programs(api, mode)


@st.composite
def _programs(draw, api, mode):
  api = api or draw(st.sampled_from(sorted(MODES)))
  if mode is None:
    modes = MODES[api]
    # XLA takes a second for each step that it compiles.
    mode = draw(st.sampled_from(modes[:-1] * 6 + modes[-1:]))
  # Half of the chains of sessions are without workers, which have no files.
  chain = draw(st.sampled_from(
      _BETWEEN_CHAINS[api] if draw(st.integers(0, 4)) == 4 else
      _CHAINS[api, mode in SESSIONS and draw(st.booleans())]))
  if mode in ("jit", "fit"):  # XLA does not compile gates, fit records nothing.
    chain = tuple(name for name in chain if name not in GATES)
  variables = tuple(draw(st.lists(_variable(), min_size=1, max_size=4)))
  name = draw(st.sampled_from(next(
      (_INNER_OF[name] for name in chain if name in _INNER_OF), _INNER[api])))
  keep = mode == "fit" and draw(st.booleans())
  setting = draw(st.sampled_from(["", "", "", *SETTINGS[mode]]))
  if setting == "clusters" and draw(st.integers(0, 19)) == 19:
    setting = "flags"
  options = {}
  if (api == "keras" and KERAS_GATE not in chain and  # Workers would mix them.
      draw(st.integers(0, 3)) == 3):
    options["accumulate"] = draw(st.integers(2, 3))
  program = Program(
      api, mode, variables, (name, options),
      tuple((name, draw(_options(
          # The variables of a model have other names in each program.
          name, keep, None if mode == "fit" else len(variables))))
            for name in chain), (), setting)
  hypothesis.assume(not any(fits(program) for fits in LIMITATIONS.values()))
  parts = draw(st.lists(_part(program), min_size=1, max_size=6))
  operations = [x for part in parts for x in part]
  if mode == "resource" and program.has_files and (
      draw(st.integers(0, 9)) == 9):
    operations.append(("export",))
  return dataclasses.replace(program, operations=tuple(operations))


def _skips(program):
  return program.has(*GATES, "LossScale")


@st.composite
def _steps(draw, program, least=1, most=4):
  """Steps, of which some have to be skipped."""
  lags = st.sampled_from([0, 0, 1, 2, 3, 5] if _skips(program) else [0])
  n = len(program.variables)
  # With accumulation, Keras loses what it has accumulated for a variable that
  # has no gradient in the last of the steps.
  may_leave_out = (n > 1 and program.mode != "fit" and
                   program.accumulates == 1 and not program.has(*WORKERS))

  def trained():
    if may_leave_out and draw(st.integers(0, 3)) == 3:
      i = draw(st.integers(0, n - 1))
      return tuple(j != i for j in range(n))
    return (True,) * n

  # All batches of Keras's `fit` have gradients of 3 rows.
  numbers = st.sampled_from([3, 7, 11] if program.mode == "fit" else range(10))
  return tuple((draw(numbers), trained(), draw(lags))
               for _ in range(draw(st.integers(least, most))))


# A validation has two batches, or draws one of three.
DATA = ("batches", "generator", "shuffled", "taken", "sequence")

# What is seldom drawn one after the other, and finds defects together.
_TOGETHER = [("steps", "save", "other", "steps"),
             ("steps", "finish", "steps"), ("steps", "freeze", "steps"),
             ("save", "steps", "restore", "steps"),
             ("steps", "save", "steps", "restore", "read"),
             ("steps", "swap", "steps"), ("steps", "seed", "read"),
             ("fail", "assign")]


@st.composite
def _part(draw, program):
  """An operation, or some that belong together."""
  kinds = _kinds(program)
  together = [part for part in _TOGETHER if kinds.issuperset(part)]
  part = draw(st.sampled_from(["steps", *sorted(kinds), *together, *together]))
  return [_operation(draw, program, kind)
          for kind in ([part] if isinstance(part, str) else part)]


def _kinds(program):
  """The names of the operations that a program may have."""
  kinds = {"steps", "rate", "assign", "read"}
  if program.averaging:
    kinds |= {"swap", "seed"}
    if program.mode == "fit":
      kinds |= {"evaluate", "validate"}
    elif program.api == "keras":
      kinds.add("finish")
  if program.mode == "fit":
    if len(program.variables) > 1 and program.accumulates == 1:
      kinds.add("freeze")
    if program.has("SWA"):
      kinds.add("epochs")
  if (program.api == "keras" and not program.has_slots and
      len(program.variables) > 1):
    kinds.add("other")
  if program.has_files:
    kinds |= {"save", "restore"}
  if not program.has(*WORKERS):
    if program.averaging:
      kinds.add("threads")
  # Known: Keras decays weights before its step fails, and a gate counts before
  # the step in it fails. In a graph, TensorFlow's Adam decays its moments
  # before it has a sparse gradient.
  if program.mode in SESSIONS and (
      program.is_one_pass or program.inner[0] not in ("Adam", "Adam0") or
      not any(v.rows for v in program.variables)) or (
      program.mode == "eager" and program.inner[0] not in ("SGDW", "AdamW") and
      not program.has(*GATES)):
    kinds.add("fail")
  return kinds


def _operation(draw, program, kind):
  eager, session = program.mode == "eager", program.mode in SESSIONS
  if kind == "steps":
    return kind, draw(_steps(program))
  if kind in ("validate", "epochs"):
    steps = draw(_steps(program, 1, 1 if kind == "validate" else 3))
    return (kind, steps, *([draw(st.sampled_from(DATA))] * (
        kind == "validate")))
  n = range(len(program.variables))
  if kind == "other":
    order = draw(st.permutations(n))[draw(st.integers(0, len(n) - 1)):]
    return kind, tuple(order)
  if kind == "freeze":
    return kind, draw(st.tuples(*[st.booleans() for _ in n]).filter(any))
  if kind == "threads":
    return kind, draw(_steps(program, 2, 4))
  if kind == "rate":
    return kind, draw(st.sampled_from([0.5, 0.25, 0.125]))
  if kind in ("swap", "seed"):
    k = draw(st.integers(0, len(program.averaging) - 1))
    if kind == "seed":
      return kind, k
    inside = ["nothing", "error", "again", "seed"]
    # Known: a gate counts a step as admitted that the averages in it refuse.
    inside += ["step"] * (eager and not program.has(*GATES))
    inside += ["save"] * program.has_files
    inside += ["other"] * (eager and program.api == "keras")
    decays = program.options(program.averaging[k]).get("decays", [None])
    return (kind, k, draw(st.integers(0, len(decays) - 1)),
            draw(st.sampled_from(inside)))
  if kind == "assign":
    return (kind, draw(st.integers(0, len(program.variables) - 1)),
            draw(st.integers(0, 9)))
  if kind == "save":
    return kind, draw(st.sampled_from(_files(program)))
  if kind == "restore":
    return kind, draw(st.sampled_from(
        ["again", "fresh", *(["deferred"] if not session and
                             program.mode != "fit" else [])]))
  if kind == "evaluate":
    return kind, draw(st.sampled_from([3, 7, 11]))
  return (kind,)


def _files(program):
  """The kinds of files that hold the state of a program."""
  if program.mode == "fit":
    # In Keras's own LossScaleOptimizer, paths tell whether it was built in fit.
    return ["checkpoint", "model", "weights"] + ["tree"] * (
        not program.has("LossScale"))
  if program.mode in SESSIONS:
    return ["swapped", "swapping"] * program.has(MOVING, *BETWEEN) + ["saver"]
  return ["checkpoint"] + ["tree"] * (program.api == "keras")
