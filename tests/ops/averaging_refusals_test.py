"""Averaging rounds on servers: values, variables and texts that are refused."""

import numpy as np
import pytest
import tensorflow as tf

from averaging_server import Server, in_graph, opened, raw_op
import averaging_task
from averaging_task import FIRST
import modes
from modes import at_build, refused, tf1
from modes import uncompiled_mode as mode  # pylint: disable=unused-import
from numerics import DOUBLE, FLOAT, HALF

FailedPrecondition = tf.errors.FailedPreconditionError
InvalidArgument = tf.errors.InvalidArgumentError

V = np.zeros(3, FLOAT)  # A value that is right.
CODE = np.zeros(7, np.uint8)  # The same, as int8.


@pytest.mark.parametrize("values, changed, text", [
    *[([V], {"weight": weight}, "weight of worker 'a' must be finite and "
       "at least 0, got ") for weight in (-1., np.inf, np.nan)],
    ([V], {"weight": 0.}, "count of worker 'a' must be 0, since its weight is "
     "0, got 1"),
    ([V, V], {}, "count of worker 'a' must be 1, the number of vectors of the "
     "center, got 2"),
    *[([V], {"count": count}, "count of worker 'a' must be 1")
      for count in (0, -1, 2**62)],
    *[([V], {"count": 1, "first": first}, r"values must be in \[0, count\), "
       f"got count 1 and 1 values from {first}")
      for first in (1, -1, 2**62, -2**63)],
    ([V[:0]], {}, r"value 0 of worker 'a' misshapen: got \[0\] but expected "
     r"\[3\] \(that of the center\)"),
    ([V[None]], {}, r"misshapen: got \[1,3\] but"),
    ([V.astype(DOUBLE)], {}, "value 0 of worker 'a' must be of dtype float, as "
     "the center, got double")])
def test_values_that_are_refused(mode, values, changed, text):
  server = opened(mode, sizes=[3])
  known = server.enter("a")
  with pytest.raises(InvalidArgument, match=text):
    server.stage("a", known, *values, **changed)
  # Nobody is told why: the worker is too late, or its turn is over.
  assert not server.stage("a", np.array([b"1 1 0 1 1 1"], object), V)
  assert not server.stage("a", np.array([b"0 1 0 0 1 1"], object), V)
  assert not server.run("follow", np.array([b"1 1 0 1 1 1"], object))
  assert not server.run("arrive", "a", known).accepted
  assert server.run("state").numbers[2] == 0


@pytest.mark.parametrize("holds_center, values, place, error, text", [
    (False, [V], FIRST, FailedPrecondition, "must hold the center to restore"),
    (True, [V], (0, 0), FailedPrecondition, "must have a center before worker "
     "'a' sends values"),
    (True, [V, V, V], FIRST, InvalidArgument, "must be 1, the number of "
     "vectors of the center, or more for velocities, got 3"),
    (True, [V.astype(HALF)], FIRST, InvalidArgument, "must be of dtype float"),
    (True, [], FIRST, InvalidArgument, "count of worker 'a' must be 1"),
    (True, None, FIRST, FailedPrecondition, "worker 'a' must send a center "
     "before round 0 of averaging rounds '.*' begins, got none; round -1"),
    (True, None, (-1, 9), InvalidArgument, "round must be at least 0, got -1"),
    (True, None, (2**63 - 1, 1), InvalidArgument, r"less than 2\^63 - 1, got")])
def test_a_center_that_is_refused(mode, holds_center, values, place, error,
                                  text):
  server = Server(mode, sizes=[3], holds_center=holds_center)
  known = np.array([f"{place[0]} {place[1]} 0 0 0"], object)
  with pytest.raises(error, match=text):
    if values is not None:
      server.stage("a", known, *values)
    server.run("restore", "a", 0, place, 0)
  assert server.place == (-1, 0)


@pytest.mark.parametrize("variables, sizes, error, text", [
    ([V[:2]], [1], InvalidArgument, "the 1 variables of vector 0 must have 3 "
     "elements together, got 2"),
    ([V, V[:1]], [2], InvalidArgument, "must have 3 elements together, got 4"),
    ([V.astype(DOUBLE)], [1], InvalidArgument, r"\[0\].* must be of the dtype "
     "float of vector 0, got double"),
    ([V.astype(np.int32)], [1], InvalidArgument, "of vector 0, got int32"),
    ([V[1:], V[:1].astype(HALF)], [2], InvalidArgument, r"\[1\].* must be of "
     r"the dtype float of .*\[0\].*, got half"),
    ([V, V], [1, 1], FailedPrecondition, "must have 2 means, and their center "
     "in variables, got 1 means"),
    ([V], [], FailedPrecondition, "must have 0 means"),
    ([V, np.zeros(1, np.int64)], [1], InvalidArgument, r"\[1\].* must be a "
     r"scalar of real numbers, got int64 of shape \[1\]"),
    ([V, np.zeros([2, 0], HALF)], [1], InvalidArgument,
     r"got half of shape \[2,0\]")])
def test_variables_that_are_refused(mode, variables, sizes, error, text):
  server = opened(mode, 1, sizes=[3])
  assert server.bring("a", V)
  known = server.close(1)
  variables = [mode.variable(v) for v in variables]
  refused(in_graph(mode), variables, error, text, lambda: averaging_task.mean(
      server.handle, known, variables, sizes))
  # The round is still open.
  good = mode.variable(V + 7)
  assert server.mean(known, [good]) == (1, 1)
  assert mode.values([good])[0].tolist() == [0, 0, 0]


@modes.only(*modes.graphs())
def test_a_variable_twice_or_without_a_value(mode):
  server = opened(mode, 1, sizes=[2])
  assert server.bring("a", V[:2])
  known = server.close(1)
  one = mode.variable(V[:1], name="one")
  late = mode.uninitialized(V[:1], name="late")
  end = lambda variables: refused(  # pylint: disable=g-long-lambda-assignment
      mode, [one], error, text, lambda: averaging_task.mean(
          server.handle, known, variables))
  error, text = InvalidArgument, (
      r"s\[0\].* and .*s\[1\].* are one variable: a variable that is updated "
      "must be named once")
  end([one, one])
  error, text = FailedPrecondition, {
      "graph": r"resources\[1\] \(variable 'late'\) is not initialized: run "
               "its initializer first",
      "ref-graph": "uninitialized value late"}[mode.name]
  end([one, late])


def test_a_round_that_is_not_closed(mode):
  server = opened(mode)
  assert server.bring("a")
  v = mode.variable(np.ones(1, FLOAT))
  known = server.run("state").known
  for known, text in (
      (known, "must be closed before it ends, got values of 'a'"),
      (np.array([b"0 1 1 0 0"], object), "must have the values of 0 workers "
       "before it ends, got values of 'a'")):
    refused(in_graph(mode), [v], FailedPrecondition, text,
            lambda: averaging_task.mean(server.handle, known, [v]))  # pylint: disable=cell-var-from-loop
    with pytest.raises(FailedPrecondition, match=text):
      server.run("outer_step", known, 1., 0., 0)


KNOWN = np.array([b"0 1 0 1 1 1"], object)
SCALARS = {"rounds": tf.resource, "worker": tf.string, "process": tf.int64,
           "most_turns": tf.int64, "turn_secs": tf.float64,
           "timeout_secs": tf.float64, "weight": tf.float64,
           "count": tf.int64, "first": tf.int64, "min_workers": tf.int64,
           "grace_secs": tf.float64, "from_generation": tf.int64,
           "learning_rate": tf.float64, "momentum": tf.float64,
           "stepped": tf.int64, "index": tf.int64, "turn": tf.int64,
           "resumes": tf.bool, "job": tf.int64}
VECTORS = {"place": (tf.int64, [2]), "known": (tf.string, [3])}
INPUTS = {  # Of each op, after "rounds".
    "join": "worker process resumes",
    "enter": "worker process place most_turns turn_secs timeout_secs",
    "stage": "worker known weight count first",
    "arrive": "worker known",
    "release": "worker turn",
    "leave": "worker process",
    "follow": "known",
    "close": "place min_workers timeout_secs grace_secs",
    "restore": "worker from_generation place job",
    "state": "",
    "outer_step": "known learning_rate momentum stepped",
    "center": "worker index count timeout_secs",
    "mean": "known",
}
GOOD = {**dict.fromkeys(SCALARS, 1), "worker": "a", "place": FIRST,
        "resumes": True,
        "known": KNOWN, "from_generation": 0, "first": 0, "index": 0,
        "momentum": 0.}


def given_to(op, rounds, **changed):
  """The arguments of an op, with the others of their names."""
  given = {"rounds": rounds,
           **{name: GOOD[name] for name in INPUTS[op].split()}}
  if op == "stage":
    given["values"] = [[0.]]
  if op == "center":
    given["T"] = tf.float32
  if op == "mean":
    given.update(resources=[], refs=[], sizes=[])
  return {**given, **changed}


@pytest.mark.by_day(21)
@pytest.mark.parametrize("op, name, value, text", [
    *[("close", "min_workers", x, r"min_workers must be in \[1, 2\], the "
       f"num_workers of averaging rounds '.*', got {x}") for x in (0, -1, 3)],
    *[(op, "timeout_secs", x, "timeout_secs must be greater than 0, infinity "
       f"for no deadline, got {x:.4g}") for op in ("close", "enter", "center")
      for x in (0., -1., np.nan, -np.inf)],
    *[("close", "grace_secs", x, f"grace_secs must be at least 0, got {x:.4g}")
      for x in (-1., np.nan)],
    *[("enter", "turn_secs", x, f"turn_secs must be greater than 0, got {x:.4g}"
      ) for x in (0., np.nan)],
    ("enter", "most_turns", -1, "most_turns must be at least 0, got -1"),
    *[(op, "place", (2**63 - 1, 0), r"round must be less than 2\^63 - 1")
      for op in ("close", "enter")],
    *[("outer_step", "learning_rate", x, "learning_rate must be finite and "
       f"greater than 0, got {x:.4g}") for x in (0., np.inf, np.nan)],
    *[("outer_step", "momentum", x, r"momentum must be in \[0, 1\), got")
      for x in (-1., 1., np.nan)],
    *[(op, "known", np.array([*texts], object), text)
      for op, cases in (("stage", 10), ("arrive", 1), ("follow", 1),
                        ("outer_step", 1), ("mean", 1))  # All parse it alike.
      for texts, text in (
          ([b"9223372036854775807 1 0 1 1"], "round must be less than"),
          *[(x, "known must be what an averaging op has told, 5 or more "
             "numbers and names, got ")
            for x in ([], [b""], [b"1 2 3 4"], [b"x 0 1 0 1 1 1"],
                      [b"a", KNOWN[0]], [b"0 1 0 1 1 "], [b"0 1  0 1 1 1"],
                      [b"\xff\0"],
                      [b"0 1 0 1 9223372036854775808"])])[-cases:]]])
def test_numbers_out_of_range(op, name, value, text):
  server = opened(modes.Eager())
  run = lambda x: raw_op(op)(**given_to(op, server.handle, **{name: x}))  # pylint: disable=g-long-lambda-assignment
  value = tf.constant(value, VECTORS[name][0] if name in VECTORS else
                      SCALARS[name])
  for function in (lambda: run(value), tf.function(lambda: run(value)),
                   tf.function(lambda x=value: run(tf.identity(x)))):
    # TensorFlow runs no op eagerly that may take refs.
    if op != "mean" or hasattr(function, "get_concrete_function"):
      with pytest.raises((InvalidArgument, ValueError), match=text):
        function()


@pytest.mark.parametrize("op, place", [("enter", (-1, 2)), ("close", FIRST)])
@pytest.mark.parametrize("more, error, text", [
    (0., tf.errors.DeadlineExceededError, "are stopped, and the chief has "
     "begun none within 0.05 seconds: start the chief"),
    (0.25, tf.errors.DeadlineExceededError, "within 0.3 seconds"),
    (-1., InvalidArgument, "stopped_secs must be at least 0, got -1"),
    (np.nan, InvalidArgument, "stopped_secs must be at least 0, got nan")])
def test_a_wait_for_rounds_that_are_stopped(mode, op, place, more, error, text):
  server = opened(mode)
  assert server.run("restore", "", 1, (-1, 2), 0)
  with pytest.raises(error, match=text):
    modes.evaluate(mode, lambda: raw_op(op)(**given_to(
        op, server.handle, place=place, timeout_secs=0.05, stopped_secs=more)))


def test_what_is_told_may_be_a_lie():
  """No text makes an op crash, or the rounds useless."""
  rng = np.random.default_rng(0)
  server = opened(modes.Eager(), holds_center=False)
  numbers = [0, 0, 1, 1, 2, -1, 2**62, -2**63, 2**63 - 1]
  for i in range(300):
    known = " ".join(map(str, rng.choice(numbers, rng.integers(5, 9))))
    if i % 2:
      known = f"0 1 {known}"
    known = np.array([known, *rng.choice(["a", "b", "", "\0"], i % 3)], object)
    op = ["stage", "arrive", "follow", "outer_step"][i % 4]
    try:
      raw_op(op)(**given_to(op, server.handle, known=known))
    except tf.errors.OpError:
      pass
  place = (int(server.place[0]), 1)
  server.run("restore", "", server.place[1], (0, 9), 0)
  assert server.bring("a", place=(0, 9)) and place[1] == 1


def test_handles_of_something_else(mode):
  table = lambda: tf.raw_ops.HashTableV2(  # pylint: disable=g-long-lambda-assignment
      key_dtype=tf.int64, value_dtype=tf.int64, shared_name="table")
  for op in INPUTS:
    with pytest.raises(InvalidArgument, match=(
        "rounds must be those of Wrapopt>AveragingRounds on this device: ")):
      in_graph(mode).run(lambda: raw_op(op)(**given_to(op, table())))  # pylint: disable=cell-var-from-loop
  server = opened(mode, 1)
  assert server.bring("a")
  known = server.close(1)
  with pytest.raises(InvalidArgument, match=r"resources\[0\] .* is not a var"):
    in_graph(mode).run(lambda: raw_op("mean")(
        server.handle, known, [table()], [], sizes=[1]))


@pytest.mark.parametrize("num_workers, sizes, text", [
    (0, [1], "num_workers' of .* (less than|at least) minimum 1"),
    (2, [1, 2], "sizes must have 1 numbers, as dtypes has, got 2"),
    (2, [-1], "sizes must be at least 0, got -1")])
def test_attributes_that_are_refused(mode, num_workers, sizes, text):
  with pytest.raises(at_build(mode, InvalidArgument), match=text):
    assert Server(mode, num_workers, sizes=sizes).place


@pytest.mark.parametrize("sizes", [[0, 0], [-1], [2], [1, 1], [2**62, 2**62]])
def test_numbers_of_variables_out_of_range(sizes):
  with tf.Graph().as_default(), pytest.raises(ValueError, match=(
      "sizes must be at least 0, and 1 together at most")):
    averaging_task.mean(averaging_task.rounds("x"), KNOWN,
                        [tf1.Variable(0., use_resource=True)], sizes)


def test_centers_that_are_not_there(mode):
  server = Server(mode, holds_center=True)
  with pytest.raises(FailedPrecondition, match="index must be less than 0"):
    server.run("center", "a", 0, 1, 9., T=tf.float32)
  server.restore(V[:1])
  for error, index, count, kwargs, text in (
      (FailedPrecondition, -1, 1, {}, "index must be less than 1, .*, got -1"),
      *((FailedPrecondition, 0, 1, {"what": what}, f"values of the {what}")
        for what in ("velocities", "errors", "codes")),
      *((InvalidArgument, 0, count, {}, r"count must be in \[1, 1\] at index 0 "
         f"of 1 values of the center of .*, got {count}")
        for count in (0, 2, -1, 2**63 - 1)),
      (InvalidArgument, 0, 1, {"T": tf.float64}, "T must be float, the dtype "
       "of value 0 of the center of averaging rounds '.*', got double")):
    with pytest.raises(error, match=text):
      server.run("center", "a", index, count, 9.,
                 **{"T": tf.float32, **kwargs})


@pytest.mark.parametrize("values, changed, text", [
    ([V], {}, "value 0 of worker 'a' must be of dtype uint8, as codes, got "
     "float"),
    ([CODE[:6]], {}, r"misshapen: got \[6\] but expected \[7\] \(that of the "
     "center"),
    ([np.append(CODE, CODE)], {"count": 1}, r"got \[14\] but expected \[7\]"),
    ([CODE, CODE], {}, "count of worker 'a' must be 1")])
def test_codes_that_are_refused(mode, values, changed, text):
  server = Server(mode, sizes=[3], holds_center=True, travels="int8")
  known = np.array([b"0 1 0 0 0"], object)
  for refused_, text_ in (
      ([CODE], "must be of dtype float, as the center, got uint8"),
      ([V, V, V, V], "must be 1, the number of vectors of the center, or more "
       "for errors and velocities, got 4")):
    with pytest.raises(InvalidArgument, match=text_):
      server.stage("a", known, *refused_)
  server.restore(V)
  known = server.enter("a")
  with pytest.raises(InvalidArgument, match=text):
    server.stage("a", known, *values, **changed)
  assert server.stage("a", known, CODE)


@pytest.mark.parametrize("changed, text", [
    ({"dtypes": [tf.float64]}, "dtypes must be float if codes of int8 travel, "
     "got double"),
    ({"holds_center": False}, "travels must be '' if the center is in "
     "variables, got 'int8'")])
def test_rounds_of_codes_that_are_refused(mode, changed, text):
  with pytest.raises((InvalidArgument, ValueError), match=text):
    assert Server(mode, **{"holds_center": True, "travels": "int8",
                           **changed}).place


RANKS = {"join": [0], "enter": [0, 1], "stage": [0], "arrive": [0, 1],
         "release": [0], "leave": [0], "follow": [0], "close": [1],
         "restore": [0],
         "state": [1, 1, 1, 1],
         "outer_step": [1], "center": [1, 1], "mean": [1]}


@pytest.mark.parametrize("op", INPUTS)
def test_shapes(op):
  names = ["rounds", *INPUTS[op].split()]

  def build(**shapes):
    holes = {name: tf1.placeholder(*VECTORS.get(name, (SCALARS.get(name), [])))
             for name in names}
    for name, shape in shapes.items():
      holes[name] = tf1.placeholder(holes[name].dtype, shape)
    return raw_op(op)(**given_to(op, **holes))

  with tf.Graph().as_default():
    for shapes in ({}, dict.fromkeys(names)):
      made = tf.nest.flatten(build(**shapes))
      assert [x.shape.rank for x in made] == RANKS[op]
    for name in names:
      text = {"place": r"got \[1\] but expected \[2\] \(a round and",
              "known": r"got \[1,1\] but expected \[1 \+ M\] \(numbers, and"}
      with pytest.raises(ValueError, match=(
          f"{name} misshapen: " + text.get(
              name, r"got \[1\] but expected \[\] \(a scalar\)"))):
        build(**{name: [1, 1] if name == "known" else [1]})


@pytest.mark.parametrize("op", INPUTS)
def test_shapes_that_show_when_it_runs(op):
  handle = opened(modes.Eager()).handle
  given = {"rounds": handle, **{
      name: tf.constant(GOOD[name], VECTORS[name][0] if name in VECTORS
                        else SCALARS[name]) for name in INPUTS[op].split()}}
  for name, right in given.items():
    @tf.function(input_signature=[tf.TensorSpec(None, right.dtype)])
    def run(bad):
      return raw_op(op)(**given_to(op, **{**given, name: bad}))  # pylint: disable=cell-var-from-loop

    with pytest.raises(InvalidArgument, match=f"{name} misshapen: got "):
      run(tf.expand_dims(right, 0))
