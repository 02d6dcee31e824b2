"""Runs a case of fuzz_ops_inputs: makes its variables, and calls its op.

A world holds the variables of one case. Their names have the case's number, so
that cases of one process do not meet. In all modes, `snapshot` tells what the
variables hold, and `call` makes one call.
"""

import contextlib
import threading

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import cancellation
from tensorflow.python.eager import context
from tensorflow.python.eager import execute
from tensorflow.python.framework import op_def_library

import fuzz_ops_inputs as inputs
import numerics

tf1 = tf.compat.v1
raw = tf.raw_ops

# A refusal. An InternalError is none: nothing that a user passes may cause it.
REFUSED = (tf.errors.InvalidArgumentError, tf.errors.FailedPreconditionError,
           tf.errors.NotFoundError, tf.errors.UnimplementedError,
           tf.errors.AbortedError, tf.errors.CancelledError,
           tf.errors.DeadlineExceededError, tf.errors.ResourceExhaustedError,
           tf.errors.OutOfRangeError, ValueError, TypeError)
ANY_ERROR = tf.errors.OpError, ValueError, TypeError  # Of an op that raises it.
SECONDS_OF_A_WAIT = 0.3  # Then a call that may wait for ever is cancelled.


def tensor(value, dtype):
  """A constant of an array; a quantized one is of integers of its size."""
  dtype = tf.as_dtype(dtype)
  if dtype.is_quantized:
    return raw.Bitcast(input=tf.constant(value), type=dtype)
  return tf.constant(value, dtype)


def inferred(op_def):
  """Names of the attributes that an op's inputs tell."""
  return {name for a in op_def.input_arg
          for name in (a.number_attr, a.type_attr, a.type_list_attr) if name}


def bound_attrs(case, op_def, given):
  """All attributes: what the inputs tell, and the others as the case has them.

  Args:
    case: A Case.
    op_def: Of its op.
    given: {argument: list of tensors}.

  Raises:
    ValueError: if two lists tell different lengths, as Python's functions do.
  """
  told = {}
  for arg in op_def.input_arg:
    tensors = given[arg.name]
    if arg.type_list_attr:
      told[arg.type_list_attr] = [t.dtype.base_dtype.as_datatype_enum
                                  for t in tensors]
    elif arg.type_attr and tensors:
      told.setdefault(arg.type_attr,
                      tensors[0].dtype.base_dtype.as_datatype_enum)
    if arg.number_attr and (
        told.setdefault(arg.number_attr, len(tensors)) != len(tensors)):
      raise ValueError(f"{arg.name} must be as long as the others of "
                       f"{arg.number_attr}, got {len(tensors)}")
  return {**case.attrs, **told}


def check_bits(got, want, what):
  if (got is None) != (want is None):
    raise AssertionError(f"{what}: got {'no' if got is None else 'a'} value, "
                         f"want {'none' if want is None else 'one'}")
  if got is None:
    return
  if (got.dtype, got.shape) != (want.dtype, want.shape):
    raise AssertionError(f"{what}: got {got.dtype} {got.shape}, want "
                         f"{want.dtype} {want.shape}")
  if got.tobytes() == want.tobytes() or got.dtype == object and (
      got.tolist() == want.tolist()):
    return
  if got.itemsize in (1, 2, 4, 8) and got.dtype.fields is None:
    numerics.assert_same_bits(got, want, what)
  raise AssertionError(f"{what}: got {got}, want {want}")


class World:
  """The variables of a case, made eagerly."""

  def __init__(self, case):
    self.case = case
    self.op_def = inputs.op_defs_once()[case.op]
    self.waits = any(a.name.startswith("timeout")
                     for a in self.op_def.input_arg)
    self.named = []  # Handles of what stays until it is destroyed.
    self.handles = [self._handle(i, v) for i, v in enumerate(case.variables)]
    self.held = [self._read(i) if v.held and v.value is not None else None
                 for i, v in enumerate(case.variables)]
    self.held_values = [None if x is None else np.array(x.numpy())
                        for x in self.held]
    self.rounds = self._rounds() if case.rounds else None
    self.function = None

  # Making.

  def _name(self, i):
    return f"fuzz {self.case.seed} {i}"

  def _on(self, device):
    return tf.device(f"/device:CPU:{device}")

  def _run(self, op):
    """In a graph, what runs before the call."""

  def _handle(self, i, variable):
    case = self.case
    with self._on(variable.device):
      if variable.kind == "table":
        handle = raw.HashTableV2(key_dtype=tf.int64, value_dtype=tf.float32,
                                 shared_name=self._name(i))
        self.named.append(handle)
        return handle
      if variable.kind == "iterator":
        return raw.IteratorV2(
            shared_name=self._name(i), container="", output_types=[tf.int64],
            output_shapes=[[]])
      # One that counts references cannot be deleted.
      anonymous = (variable.anonymous and "graph" not in case.mode and
                   variable.kind == "variable")
      handle = raw.VarHandleOp(
          dtype=variable.dtype,
          shape=tf.TensorShape(variable.shape if variable.static else None),
          shared_name=context.anonymous_name() if anonymous else self._name(i))
      if not anonymous:
        self.named.append(handle)
      if variable.kind == "deleted" or variable.value is not None:
        value = variable.value
        if value is None:
          value = inputs.array(np.random.default_rng(0), variable.dtype,
                               variable.shape)
        made = raw.AssignVariableOp(resource=handle,
                                    value=tensor(value, variable.dtype))
        self._run(made)
        with tf.control_dependencies([made] if made is not None else []):
          if variable.kind == "deleted":
            self._run(raw.DestroyResourceOp(resource=handle))
          elif (variable.copy_on_read and value.ndim and
                variable.dtype in (inputs.FLOAT, inputs.DOUBLE)):
            self._run(raw.ResourceScatterAdd(
                resource=handle, indices=tf.constant([], tf.int32),
                updates=tensor(value[:0], variable.dtype)))
      return handle

  def _read(self, i):
    variable = self.case.variables[i]
    with self._on(variable.device):
      return raw.ReadVariableOp(resource=self.handles[i], dtype=variable.dtype)

  def _rounds(self):
    """Averaging rounds, with the workers that have come."""
    rounds = self.case.rounds
    n = len(rounds.sizes)
    integer = lambda x: tf.constant(x, tf.int64)
    double = lambda x: tf.constant(x, tf.float64)
    handle = last = self._raw(
        "Wrapopt>AveragingRounds", num_workers=rounds.workers, settings="",
        dtypes=rounds.dtypes, sizes=rounds.sizes, container="", travels="",
        holds_center=rounds.center is not None,
        shared_name=self._name("rounds"))
    self.named.append(handle)

    def run(op, **given):
      nonlocal last
      with tf.control_dependencies([last] if self.in_graph() else []):
        made = self._raw(f"Wrapopt>Averaging{op}", rounds=handle, **given)
      last = made[0] if isinstance(made, (list, tuple)) else made
      return made

    def stage(worker, known, values):
      run("Stage", worker=worker, known=known, weight=double(1.),
          count=integer(n), first=integer(0),
          values=[tf.constant(v) for v in values])

    def enter(worker, values):
      _, known = run(
          "Enter", worker=worker, process=integer(0), most_turns=integer(99),
          place=integer(rounds.place), turn_secs=double(np.inf),
          timeout_secs=double(np.inf), stopped_secs=0.0)
      stage(worker, known, values)
      return known

    told = lambda place: tf.constant([f"{place[0]} {place[1]} 0 0 0"])
    if rounds.place[1]:
      if rounds.center is not None:
        stage(inputs.CENTRAL, told(rounds.place), rounds.center)
      run("Restore", worker=inputs.CENTRAL, from_generation=integer(0),
          place=integer(rounds.place), job=integer(0))
    for worker, values in rounds.members.items():
      run("Arrive", worker=worker, known=enter(worker, values))
    for worker, values in rounds.staged.items():
      enter(worker, values)
    if rounds.is_closed:
      run("Close", place=integer(rounds.place), min_workers=integer(1),
          timeout_secs=double(0.001), grace_secs=double(0.), stopped_secs=0.0)
    if rounds.offered is not None:
      stage(inputs.CENTRAL, told(inputs.OFFERED), rounds.offered)
    self._run(last)
    return handle

  def in_graph(self):
    return not tf.executing_eagerly()

  @staticmethod
  def _raw(name, **arguments):
    """Calls an op by its name, as Python's functions for ops do."""
    if tf.executing_eagerly():
      op_def = inputs.op_defs_once()[name]
      flat, attrs = [], []
      for arg in op_def.input_arg:
        value = arguments.pop(arg.name)
        values = value if isinstance(value, list) else [value]
        flat += [tf.convert_to_tensor(v) for v in values]
        if arg.type_list_attr:
          attrs += [arg.type_list_attr,
                    [v.dtype.as_datatype_enum for v in values]]
      for key, value in arguments.items():
        attrs += [key, value]
      made = execute.execute(name, len(op_def.output_arg), flat, tuple(attrs),
                             context.context())
      return made[0] if len(made) == 1 else made
    return op_def_library.apply_op(name, **arguments)

  def _ticket(self):
    """A ticket of the step variable, if that is one; else any handle."""
    step = self.case.inputs["step"][0]
    step_handle = self.handles[step]
    with self._on(0):
      counter = raw.VarHandleOp(dtype=tf.float32, shape=[],
                                shared_name=self._name("counter"))
      histogram = raw.VarHandleOp(dtype=tf.int64, shape=[2, 1],
                                  shared_name=self._name("histogram"))
      made = [raw.AssignVariableOp(resource=counter, value=0.),
              raw.AssignVariableOp(resource=histogram,
                                   value=tf.zeros([2, 1], tf.int64))]
    self.named += [counter, histogram]
    number = tf.constant(2**62, tf.int64)
    with tf.control_dependencies(made if self.in_graph() else []):
      if self.op_def.name.endswith("Ref"):
        counter = raw.VariableV2(dtype=tf.float32, shape=[])
        histogram = raw.VariableV2(dtype=tf.int64, shape=[2, 1])
        made = [raw.Assign(ref=counter, value=0.),
                raw.Assign(ref=histogram, value=tf.zeros([2, 1], tf.int64))]
        with tf.control_dependencies(made):
          return self._raw("Wrapopt>StalenessGateRef", step=step_handle,
                           stale_counter=counter, histogram=histogram,
                           recorded=number, limit=number,
                           token=tf.constant(-1, tf.int64))[2]
      try:
        return self._raw("Wrapopt>StalenessGate", step=step_handle,
                         stale_counter=counter, histogram=histogram,
                         recorded=number, limit=number,
                           token=tf.constant(-1, tf.int64))[2]
      except REFUSED:
        return counter

  def _lock(self):
    """A lock of a new variable."""
    with self._on(0):
      variable = raw.VarHandleOp(dtype=tf.float32, shape=[],
                                 shared_name=self._name("locked"))
      made = raw.AssignVariableOp(resource=variable, value=0.)
    self.named.append(variable)
    with tf.control_dependencies([made] if self.in_graph() else []):
      return self._raw("Wrapopt>LockSteps", variable=variable, of="")

  # Inputs of the call: {argument: list of tensors}.

  def _dtype(self, arg, value):
    dtype = self.case.attrs[arg.type_attr] if arg.type_attr else arg.type
    if value.dtype == object:
      return tf.string
    # An array keeps its own dtype where an attribute was spoiled.
    fits = (dtype and tf.as_dtype(dtype).is_quantized and
            value.dtype.kind in "iu" and
            value.dtype.itemsize == tf.as_dtype(dtype).size)
    return dtype if fits else tf.as_dtype(value.dtype)

  def _bundle(self, indices):
    handles = [self.handles[i] for i in indices]
    how = self.case.bundle
    if not handles or how == "empty":
      return raw.Pack(values=[self.handles[0]], axis=0)[:0] if handles else (
          raw.VarHandleOp(dtype=tf.float32, shape=[]))
    if how == "vector":
      return self._raw("Wrapopt>Bundle", variables=handles,
                       **({"N": len(handles)} if not self.in_graph() else {}))
    packed = raw.Pack(values=handles, axis=0)
    return packed[0] if how == "scalar" else packed[None]

  def arguments(self):
    result = {}
    for arg in self.op_def.input_arg:
      given = self.case.inputs[arg.name]
      if inputs.is_variable(arg):
        result[arg.name] = ([self._bundle(given)] if self.case.bundle else
                            [self.handles[i] for i in given])
      elif arg.name == "rounds":
        result[arg.name] = [self.rounds]
      elif arg.name == "ticket":
        result[arg.name] = [self._ticket()]
      elif arg.name == "lock":
        result[arg.name] = [self._lock()]
      else:
        result[arg.name] = [tensor(v, self._dtype(arg, v)) for v in given]
    return result

  # Calls.

  def _outputs(self, attrs):
    """The number of the op's outputs."""
    count = 0
    for arg in self.op_def.output_arg:
      count += (attrs[arg.number_attr] if arg.number_attr else
                len(attrs[arg.type_list_attr]) if arg.type_list_attr else 1)
    return count

  @contextlib.contextmanager
  def _cancelled_in_time(self):
    if not self.waits:
      yield None
      return
    manager = cancellation.CancellationManager()
    timer = threading.Timer(SECONDS_OF_A_WAIT, manager.start_cancel)
    timer.start()
    try:
      with cancellation.CancellationManagerContext(manager):
        yield manager
    finally:
      timer.cancel()

  def call(self):
    """Makes one call; returns its outputs, with None for a resource."""
    case, op_def = self.case, self.op_def
    given = self.arguments()
    attrs = case.attrs = bound_attrs(case, op_def, given)
    if case.mode == "eager":
      given = [x for xs in given.values() for x in xs]
      flat_attrs = tuple(x for pair in attrs.items() for x in pair)
      with self._on(0), self._cancelled_in_time() as manager:
        if manager is None:
          made = execute.execute(op_def.name, self._outputs(attrs), given,
                                 flat_attrs, context.context())
        else:
          made = execute.execute_with_cancellation(
              op_def.name, self._outputs(attrs), given, flat_attrs,
              context.context(), manager)
    else:
      if self.function is None:
        self.function = self._traced()
      with self._cancelled_in_time():
        made = self.function(given)
    return [None if x.dtype == tf.resource else np.array(x.numpy())
            for x in made or ()]

  def _apply(self, given):
    """The op in a graph."""
    keywords = {}
    for arg in self.op_def.input_arg:
      values = given[arg.name]
      keywords[arg.name] = values if inputs.is_list(arg) else values[0]
    told = inferred(self.op_def)
    for attr in self.op_def.attr:
      if attr.name not in told:
        value = self.case.attrs[attr.name]
        keywords[attr.name] = value
    made = op_def_library.apply_op(self.op_def.name, **keywords)
    if made is None or isinstance(made, tf.Operation):
      return []
    if isinstance(made, (list, tuple)):
      return [x for y in made for x in (y if isinstance(y, list) else [y])]
    return [made]

  def _traced(self):
    captured = [a.name for a in self.op_def.input_arg if inputs.is_variable(a)]

    @tf.function(jit_compile=self.case.mode == "jit" or None, autograph=False)
    def function(given):
      given = dict(given)
      given.update({name: handles[name] for name in captured})
      return self._apply(given)

    handles = {}

    def call(given):
      handles.update({name: given[name] for name in captured})
      others = {k: v for k, v in given.items() if k not in captured}
      if not self.case.hidden:
        return function(others)
      specs = tf.nest.map_structure(
          lambda t: t if t.dtype == tf.resource else tf.TensorSpec(
              None, t.dtype), others)
      if self.case.mode == "jit" or any(
          isinstance(x, tf.Tensor) for x in tf.nest.flatten(specs)):
        return function(others)
      if "concrete" not in handles:
        handles["concrete"] = function.get_concrete_function(specs)
      return handles["concrete"](others)

    return call

  # What stands.

  def snapshot(self):
    """What each variable holds; None for one without a value."""
    values = []
    for i, (variable, handle) in enumerate(zip(self.case.variables,
                                               self.handles)):
      if variable.kind in ("table", "iterator") or not bool(
          self._is_initialized(handle, variable)):
        values.append(None)
      else:
        values.append(np.array(self._read(i).numpy()))
    return values

  def _is_initialized(self, handle, variable):
    with self._on(variable.device):
      return raw.VarIsInitializedOp(resource=handle)

  def check_held(self):
    for i, (kept, value) in enumerate(zip(self.held, self.held_values)):
      if kept is not None:
        check_bits(np.array(kept.numpy()), value,
                            f"variable {i}, which somebody has read before")

  def probe(self):
    """What StalenessRecord says of the step, or None."""
    step = self.case.inputs.get("step")
    if not step or not inputs.family(self.case.op).startswith(
        ("Staleness", "BeginUpdate")):
      return None
    try:
      return [int(x) for x in self._record(self.handles[step[0]])]
    except REFUSED:
      return None

  def _record(self, step):
    return self._raw("Wrapopt>StalenessRecord", step=step)

  def close(self):
    for handle in self.named:
      raw.DestroyResourceOp(resource=handle, ignore_lookup_error=True)


class GraphWorld(World):
  """The same in a graph of TensorFlow 1, and a session."""

  def __init__(self, case):
    self.before = []
    self.graph = tf.Graph()
    with self.graph.as_default():
      super().__init__(case)
      self.session = tf1.Session(config=tf1.ConfigProto(
          device_count={"CPU": 2}, use_per_session_threads=False))
      self.reads = [
          None if case.mode == "graph" and v.kind in ("table", "iterator") else
          (self._is_initialized(h, v), self._value(i))
          for i, (v, h) in enumerate(zip(case.variables, self.handles))]
      for op in self.before:
        if op is not None:
          self.session.run(op)

  def _run(self, op):
    self.before.append(op)

  def _read(self, i):
    return None

  @property
  def held_values(self):
    return self.held

  @held_values.setter
  def held_values(self, _):
    self.held = []

  def _handle(self, i, variable):
    if self.case.mode == "graph":
      return super()._handle(i, variable)
    with self._on(variable.device):
      ref = raw.VariableV2(
          dtype=variable.dtype, shared_name=self._name(i),
          shape=tf.TensorShape(variable.shape if variable.static else None))
      if variable.value is not None and variable.kind == "variable":
        self._run(raw.Assign(ref=ref, value=tensor(
            variable.value, variable.dtype), validate_shape=variable.static))
    return ref

  def _value(self, i):
    variable = self.case.variables[i]
    with self._on(variable.device):
      if self.case.mode == "graph":
        return raw.ReadVariableOp(resource=self.handles[i],
                                  dtype=variable.dtype)
      return raw.Identity(input=self.handles[i])

  def _is_initialized(self, handle, variable):
    with self._on(variable.device):
      if self.case.mode == "graph":
        return raw.VarIsInitializedOp(resource=handle)
      return raw.IsVariableInitialized(ref=handle)

  def snapshot(self):
    try:
      self.last = self._snapshot()
    except tf.errors.InvalidArgumentError as e:
      # A session that cannot place its graph runs nothing any more.
      if "Cannot place" not in str(e) and "Cannot colocate" not in str(e):
        raise
    return self.last

  def _snapshot(self):
    with self.graph.as_default():
      asked = [r[0] for r in self.reads if r is not None]
      there = iter(self.session.run(asked) if asked else ())
      there = [r is not None and bool(next(there)) for r in self.reads]
      asked = [r[1] for r, yes in zip(self.reads, there) if yes]
      values = iter(self.session.run(asked) if asked else ())
      return [np.array(next(values)) if yes else None for yes in there]

  def call(self):
    with self.graph.as_default():
      if self.function is None:
        with self._on(0):
          given = self.arguments()
          self.case.attrs = bound_attrs(self.case, self.op_def, given)
          self.feeds = {}
          if self.case.hidden:
            for arg in self.op_def.input_arg:
              if not inputs.is_variable(arg) and (
                  arg.name not in inputs.OTHER_RESOURCES):
                given[arg.name] = [self._placeholder(x)
                                   for x in given[arg.name]]
          self.function = self._apply(given)
          last = tf1.get_default_graph().get_operations()[-1]
        self.fetches = [x for x in self.function if x.dtype != tf.resource]
        # Also of an op without outputs.
        op = self.function[0].op if self.function else last
        self.fetches.append(op)
      options = (tf1.RunOptions(timeout_in_ms=int(1000 * SECONDS_OF_A_WAIT))
                 if self.waits else None)
      made = iter(self.session.run(self.fetches, self.feeds, options=options))
      return [None if x.dtype == tf.resource else np.array(next(made))
              for x in self.function]

  def _placeholder(self, t):
    hole = tf1.placeholder(t.dtype, None)
    constant = tf.get_static_value(t)
    if constant is None:  # Cast to a quantized dtype.
      return t
    self.feeds[hole] = constant
    return hole

  def check_held(self):
    pass

  def _record(self, step):
    with self.graph.as_default():
      ref = self.case.mode == "ref-graph"
      return self.session.run(list(self._raw(
          "Wrapopt>StalenessRecord" + "Ref" * ref, step=step)))

  def close(self):
    self.session.close()


def world_of(case):
  return (GraphWorld if "graph" in case.mode else World)(case)
