"""The harness, and that contenders do the same work in the way they say."""

import datetime
import importlib.util
import os
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import benches
import processes
from training import type_of
from wrapopt.bench import __main__ as command
from wrapopt.bench import gate
from wrapopt.bench import harness
from wrapopt.bench import links
from wrapopt.bench import sets
from wrapopt.bench import step
from wrapopt.bench import stream_limit
from wrapopt.bench import tables

_SHAPES = [(3, 40), (5,), ()]  # 126 numbers.
# {file of results: a command of them}.
_COMMANDS = {
    "gate": "gate --sets resnet50",
    "rounds": "rounds --workers 2 4",
    "step": "step --sets resnet50 --optimizers Adam",
    "step-jit": "step --sets resnet50 --optimizers Momentum --modes jit",
    "step-schedule-free": "step --sets resnet50 --optimizers Schedule-Free",
    "step-averages": "step --sets resnet50 --optimizers averages --modes jit",
}


@pytest.fixture
def small(monkeypatch):
  benches.make_small(monkeypatch, _SHAPES)


def test_resnet50_is_keras_resnet50_without_the_biases_of_convolutions():
  model = keras.applications.ResNet50(weights=None)
  expected = [
      tuple(w.shape)
      for layer in model.layers for w in layer.trainable_weights
      if not (isinstance(layer, keras.layers.Conv2D) and w.name == "bias")]
  shapes = sets.VARIABLE_SETS["resnet50"]
  assert sorted(shapes) == sorted(expected)
  assert len(shapes) == 161
  assert sum(sets.sizes(shapes)) == 25_557_032


def test_bert_base():
  shapes = sets.VARIABLE_SETS["bert-base"]
  assert len(shapes) == 199
  # 110 million, of which a pooler and an embedding of 30522 word pieces.
  assert sum(sets.sizes(shapes)) == 109_482_240


def test_sizes():
  assert sets.sizes([(2, 3), (), (0, 7)]) == [6, 1, 0]
  assert sum(sets.sizes(sets.VARIABLE_SETS["2x4096x4096"])) == 2**25


@pytest.fixture
def clock(monkeypatch):
  """A function for contenders that move the clock; and what was called."""
  now, called = 0, []

  def contender(name, seconds):
    def call():
      nonlocal now
      now += seconds
      called.append(name)
    return call

  monkeypatch.setattr(harness.time, "perf_counter", lambda: now)
  return contender, called


def test_alternate_gives_every_contender_one_turn_in_a_round(clock):
  """A clock that each call of "fast" moves by 1, of "slow" by 3 seconds."""
  contender, called = clock
  placed = []
  seconds = harness.alternate(
      {"fast": contender("fast", 1), "slow": contender("slow", 3)}, 20, "test",
      places=[lambda: placed.append((len(called), "a")),
              lambda: placed.append((len(called), "b"))],
      turn_seconds=6)
  assert seconds == {"fast": [1.0] * 20, "slow": [3.0] * 20}
  # Two to warm up and one to see how long it takes.
  assert called[:6] == ["fast"] * 3 + ["slow"] * 3
  turns = called[6:]
  # In each round, one call that is not timed and 6 seconds of timed ones.
  orders = set()
  for begin in range(0, len(turns), 10):
    turn = turns[begin:begin + 10]
    first = turn[0]
    orders.add(first)
    other = {"fast": "slow", "slow": "fast"}[first]
    count = {"fast": 7, "slow": 3}
    assert turn == [first] * count[first] + [other] * count[other]
  assert orders == {"fast", "slow"}
  assert len(turns) == 200
  # New arrays before all, and before each round.
  assert [n for n, _ in placed] == [
      n for n in (0, *range(6, 206, 10)) for _ in range(2)]
  pairs = {(placed[i][1], placed[i + 1][1]) for i in range(0, len(placed), 2)}
  assert pairs == {("a", "b"), ("b", "a")}


def test_a_turn_that_is_not_warm_is_one_call(clock):
  contender, called = clock
  seconds = harness.alternate({"a": contender("a", 5)}, 3, "test", warm=False)
  assert seconds == {"a": [5.0] * 3} and called == ["a"] * 3


def test_speedup_pairs_the_rounds():
  # The second round was disturbed: both took ten times as long.
  assert harness.speedup([1., 10., 1.], [2., 20., 3.]) == 2
  assert harness.speedup([4., 4., 4.], [1., 2., 8.]) == 0.5


def test_spread():
  assert harness.spread([1., 2., 3., 4., 5.]) == pytest.approx(1 / 3)
  assert harness.spread([2., 2., 2.]) == 0
  assert harness.spread([2.]) == 0


def test_results_of_a_contest(monkeypatch, capsys):
  """Three contenders in two modes, whose times are known."""
  seconds = {(None, "plain"): [1., 1., 2.], ("jit", "plain"): [2., 4., 2.],
             ("jit", "ours"): [1., 1., 1.]}
  limit = {2: [0.5, 0.5, 0.25], 3: [1., 1., 1.]}
  monkeypatch.setattr(harness, "alternate", lambda contenders, *_, **__: {
      key: seconds.get(key) or limit[int(key[1][-8])] for key in contenders})
  contest = harness.Contest(
      "some", {"set": "a"}, streams=[(5, 2)],
      peers={"x_plain": "plain", "of_fastest": [("jit", "ours"),
                                                ("jit", "plain")]})
  contest.add({"plain": None}, written={"plain": 2})
  contest.add({"plain": None, "ours": None}, mode="jit",
              written={"plain": 2, "ours": 3})
  first, second, *results = harness.run([contest], 3)
  assert [first["contender"], second["contender"]] == [
      f"streaming limit, {n} arrays" for n in (2, 3)]
  assert first["of_limit"] == second["of_limit"] == 1
  common = {"set": "a", "spread": 0.0, "rounds": 3}
  assert results == [
      {**common, "contender": "plain", "milliseconds": 1000, "spread": 0.25,
       "gigabytes_per_second": 2e-7, "of_limit": 0.5, "x_plain": 1,
       "of_fastest": 1},
      {**common, "mode": "jit", "contender": "plain", "milliseconds": 2000,
       "spread": 0.25, "gigabytes_per_second": 1e-7, "of_limit": 0.125,
       "x_plain": 1, "of_fastest": 0.5},
      {**common, "mode": "jit", "contender": "ours", "milliseconds": 1000,
       "gigabytes_per_second": pytest.approx(2.8e-7), "of_limit": 1,
       "x_plain": 0.5, "of_fastest": 1}]
  progress, printed = capsys.readouterr().out.split("\n\n")
  assert progress == "a: 1 ready, 0 s\na: jit ready, 0 s"
  title, header, *rows = printed.splitlines()
  assert title == "some"
  assert re.split("  +", header.strip()) == [
      "ms", "+-", "GB/s", "of limit", "x plain", "of fastest"]
  assert [row.split("  ")[0] for row in rows] == [
      first["contender"], second["contender"], "plain", "jit, plain",
      "jit, ours"]


def test_contests_of_one_title_are_one_table(capsys):
  def contests():
    for size in 1, 2000:
      contest = harness.Contest("all", {"size": size})
      contest.add({"ours": lambda: None})
      yield contest
      contest.results[0]["bytes"] = 7 * size

  harness.run(contests(), 1)
  printed = capsys.readouterr().out.split("\n\n")[1]
  assert [row.split()[0] for row in printed.splitlines()] == [
      "all", "ms", "1", "2,000"]
  assert printed.split()[-1] == "14,000"


def test_the_limit_passes_over_as_many_arrays(monkeypatch):
  made = []
  limit = stream_limit.StreamLimit
  monkeypatch.setattr(stream_limit, "StreamLimit",
                      lambda *args: made.append(limit(*args)) or made[-1])
  contest = harness.Contest("", {}, streams=_SHAPES)
  contest.add({"a": lambda: None, "b": lambda: None}, written={"a": 1, "b": 3})
  contest.measure(1)
  assert [x.bytes for x in made[:2]] == [126 * 4 * (1 + 2 * n) for n in (1, 3)]


def test_table():
  results = [{"set": "a", "contender": "x", "milliseconds": 1.0},
             {"set": "a", "contender": "yyy", "milliseconds": 10.26,
              "x_other": 0.0317}]
  assert tables.text(results, ["set"]) == (
      "       ms  x other\nx       1         \nyyy  10.3     0.03")


def test_busy_cores():
  """A process that only computes is other work."""
  with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
    try:
      assert harness.busy_cores(2) > 0.2
    finally:
      process.kill()


def test_threads():
  """Those that this process may run on, until somebody says a number."""
  script = ("import tensorflow as tf; from wrapopt.bench import harness; "
            "print(harness.threads()); "
            "tf.config.threading.set_intra_op_parallelism_threads(7); "
            "print(harness.threads())")
  assert processes.printed_by("-c", script).split() == [
      str(len(os.sched_getaffinity(0))), "7"]


# The op of each contender's name is in its graph, and no other.


def types_in_session(make):
  """({contender: op}, types of all ops), of a graph for a session."""
  with tf.Graph().as_default() as graph, tf.device("/cpu:0"):
    contenders, _, _ = make()
  return contenders, list(map(type_of, graph.get_operations()))


def types_in_function(function):
  return list(map(
      type_of, function.get_concrete_function().graph.get_operations()))


def test_gated_steps_are_what_their_names_say():
  contenders, types = types_in_session(lambda: gate.graph(_SHAPES))
  assert list(contenders) == [
      "ungated, one op", "gated, admitted", "ungated, stock",
      "tf.cond around stock, admitted", "gated, dropped",
      "tf.cond around stock, dropped"]
  assert types.count("Wrapopt>ApplyMomentum") == 3
  assert types.count("Wrapopt>StalenessGate") == 2
  # Those of the conds are in functions.
  assert types.count("ResourceApplyMomentum") == len(_SHAPES)


def momentum():
  return step.steps_of(_SHAPES, "Momentum")


def test_steps_are_what_their_names_say():
  contenders, types = types_in_session(lambda: step.graph(momentum))
  assert list(contenders) == list(step.STEPS)
  assert types.count("Wrapopt>ApplyMomentum") == 3  # K = 0, 1, 3.
  assert "Wrapopt>EmaUpdate" not in types and "VariableV2" not in types
  # The two stock contenders.
  assert types.count("ResourceApplyMomentum") == 2 * len(_SHAPES)
  assert types.count("AssignSubVariableOp") == len(_SHAPES)
  functions, _, _ = step.in_functions(momentum)
  for name, function in functions.items():
    types, ours = types_in_function(function), name.startswith("wrapopt")
    assert types.count("Wrapopt>ApplyMomentum") == int(ours)
    assert ("ResourceApplyMomentum" in types) == (not ours)
    assert types.count("AssignSubVariableOp") == (
        len(_SHAPES) if name == "stock + EMA" else 0)


def test_compiled_steps_are_what_their_names_say():
  contenders, _, _ = step.in_functions(momentum, jit_compile=True)
  for name, function in contenders.items():
    hlo = function.experimental_get_compiler_ir()("hlo")
    ours = name.startswith("wrapopt")
    assert ('op_type="Wrapopt>Apply"' in hlo) == ours
    assert ('op_type="ResourceApplyMomentum"' in hlo) == (not ours)
    # Variables and slots, and the averages where there are some.
    averages = step.STEPS[name]
    assert hlo.split("\n", 1)[0].count("may-alias") == (
        len(_SHAPES) * (2 + averages))


def test_steps_begin_alike_on_new_numbers():
  """Neither zero pages nor averages that have arrived."""
  steps, = step.steps_of(_SHAPES, "Adam")
  for name in step.STEPS:
    steps.apply(name, step._pairs(steps))
  steps.fill()
  values = steps.values
  flat = np.concatenate([v.numpy().ravel() for row in (
      values, steps.grads, steps.slots()) for v in row])
  assert len(flat) == 4 * 126 + 2
  assert len(np.unique(flat)) > 0.99 * len(flat)
  assert flat.min() >= 0.1 and flat.max() < 1
  first, *others = steps.averages().values()
  assert len(others) == 4
  for row in others:
    for value, a, b in zip(values, first, row):
      np.testing.assert_array_equal(a.numpy(), b.numpy())
      assert np.all(a.numpy() != value.numpy())


def gated(state, rate=1e-3):
  state["momenta"] = 0.9 * state["momenta"] + state["gradients"]
  state["weights"] = state["weights"] - rate * state["momenta"]


def followed(state, decay=0.99, extra=0.0):
  for what in "values", "slots":
    state[what] = state[what] + 1 + extra
  average = state["average 1 of wrapopt K=3"]
  state["average 1 of wrapopt K=3"] = average + (1 - decay) * (
      state["values"] - average)


@pytest.mark.parametrize("name, expected, state, right, wrong, what", [
    ("gated, admitted", gate.expected,
     {"weights": 1.0, "momenta": 1.0, "gradients": 1.0}, gated,
     lambda s: gated(s, 2e-3), "weights"),
    ("gated, dropped", gate.expected,
     {"weights": 1.0, "momenta": 1.0, "gradients": 1.0}, lambda s: None,
     gated, "weights"),
    ("eager, wrapopt K=3", step.Expected(),
     {"values": 0.0, "slots": 0.0, "average 0 of wrapopt K=1": 0.0,
      "average 1 of wrapopt K=3": 0.0}, followed,
     lambda s: followed(s, decay=0.9), "average 1 of wrapopt K=3"),
    ("eager, wrapopt K=3", step.Expected(), {"values": 0.0, "slots": 0.0,
                                             "average 1 of wrapopt K=3": 0.0},
     followed, lambda s: followed(s, extra=1e-4), "values"),
])
def test_a_contender_that_does_other_work_is_refused(
    name, expected, state, right, wrong, what):
  now = {}
  place = lambda: now.update(state)
  arguments = lambda: dict(now), expected, place
  harness.check({name: lambda: right(now)}, *arguments)
  with pytest.raises(AssertionError, match=(
      f"^{re.escape(name)}: {what} must be off by at most .*, got ")):
    harness.check({name: lambda: wrong(now)}, *arguments)


@pytest.mark.parametrize("name", _COMMANDS)
def test_command(name, small, tmp_path, capsys):
  written = benches.run(f"{_COMMANDS[name]} --rounds 1", tmp_path)
  benches.check_columns(name, written)
  assert {r["rounds"] for r in written["results"]} == {1}
  assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
  printed = capsys.readouterr()
  assert f"TensorFlow {tf.__version__}" in printed.out
  # Progress does not get into a file with the tables.
  assert "turn" not in printed.out and "turn" in printed.err


@pytest.mark.parametrize("has_hosts", [True, False])
def test_links(has_hosts, monkeypatch, tmp_path):
  if not has_hosts:
    monkeypatch.setattr(links.hosts_module, "missing", lambda: "by a test")
  elif links.hosts_module.missing():
    pytest.skip(links.hosts_module.missing())
  monkeypatch.setattr(links, "_NUMBERS", 1000)
  monkeypatch.setattr(links, "_STEPS", 4)
  monkeypatch.setitem(links._VARIANTS, "ahead", {
      "dtype": "int4", "overlap_steps": 3})
  results = benches.run("links --megabits 50 --variants plain ahead "
                        "--rounds 2", tmp_path)["results"]
  plain, ahead = results[-2:]
  assert [r["contender"] for r in results] == (
      ["torchft, published"] * has_hosts + ["plain", "ahead"])
  assert plain["megabits"] == ("50" if has_hosts else "no limit")
  for result in plain, ahead:
    assert 0 < result["computes"] < 1
  # The model has 176,000 bytes. A host sends 1.5 times as many, and headers.
  # The loopback device counts those of all workers.
  assert plain["sent"] > 1.5 * 0.176
  assert has_hosts == (plain["sent"] < 2 * 0.176)
  assert ahead["sent"] < 0.5 * plain["sent"]


def test_facts_of_a_run(small, tmp_path):
  written = benches.run("gate --quick --sets 400x256", tmp_path)
  assert written["benchmark"] == "gate"
  assert written["environment"].keys() == {
      "wrapopt", "TensorFlow", "kernels", "threads", "processor", "load",
      *(["PyTorch"] if importlib.util.find_spec("torch") else [])}
  assert written["command"] == (
      "python -m wrapopt.bench gate --quick --sets 400x256")
  assert written["date"] == datetime.date.today().isoformat()
  assert written["machine"] in ("quiet", "busy")
  assert {(r["set"], r["rounds"]) for r in written["results"]} == {
      ("400x256", 5)}


@pytest.mark.parametrize("before, after, machine", [
    (0.1, 0.0, "quiet"), (0.0, 0.11, "busy"), (0.11, 0.0, "busy")])
def test_command_says_whether_the_machine_is_busy(
    before, after, machine, monkeypatch, tmp_path, capsys):
  busy = [before, after]
  monkeypatch.setattr(harness, "busy_cores", lambda: busy.pop(0))
  monkeypatch.setattr(gate, "contests", lambda options: [])
  assert benches.run("gate", tmp_path)["machine"] == machine
  assert capsys.readouterr().out.endswith(
      f"{machine} machine: other work used {before:.2f} cores before and "
      f"{after:.2f} after\n")


def test_command_of_a_result():
  assert command._command(["keras", "--json", "a file", "--models", "a b"]) == (
      "python -m wrapopt.bench keras --models 'a b'")


def test_command_of_a_choice(monkeypatch):
  monkeypatch.setenv("WRAPOPT_XLA_ON_GPU", "call")
  assert command._command(["step"]) == (
      "WRAPOPT_XLA_ON_GPU=call python -m wrapopt.bench step")
  monkeypatch.setenv("WRAPOPT_XLA_ON_CPU", "hlo")
  assert command._command(["step"]) == (
      "WRAPOPT_XLA_ON_CPU=hlo WRAPOPT_XLA_ON_GPU=call "
      "python -m wrapopt.bench step")


def test_progress_is_printed_at_once(monkeypatch):
  """A pipe, unlike a terminal, shows only what is flushed."""
  read, write = os.pipe()
  os.set_blocking(read, False)
  with open(read, "rb", buffering=0) as out, open(write, "w") as pipe:
    monkeypatch.setattr(sys, "stdout", pipe)
    harness.Contest("", {"set": "some"}).add({"ours": None})
    assert out.read(100) == b"some: 1 ready, 0 s\n"


@pytest.mark.parametrize("arguments, rounds", [
    (["gate"], 15), (["gate", "--quick"], 5), (["gate", "--rounds", "4"], 4)])
def test_command_without_arguments_runs_all(arguments, rounds, monkeypatch):
  asked = []
  monkeypatch.setattr(harness, "run", lambda contests, n: asked.append(n) or [])
  monkeypatch.setattr(gate, "contests", lambda options: asked.append(
      options.sets))
  command.main(arguments)
  assert asked == [list(sets.VARIABLE_SETS), rounds]


@pytest.mark.parametrize("args,error", [
    (["step", "--optimizers", "Adamax"],
     "argument --optimizers: invalid choice: 'Adamax'"),
    ([], "the following arguments are required: NAME"),
    (["gates"], "invalid choice: 'gates'"),
    (["gate", "--sets", "vgg"], "argument --sets: invalid choice: 'vgg'"),
    (["gate", "--json", "/no/such/folder/f"],
     "argument --json: cannot write /no/such/folder/f: "
     "No such file or directory"),
])
def test_command_errors(args, error, capsys, monkeypatch):
  monkeypatch.setattr(harness, "run", lambda *_: pytest.fail("it ran"))
  with pytest.raises(SystemExit) as e:
    command.main(args)
  assert e.value.code == 2
  assert error in capsys.readouterr().err


def test_help_of_the_command():
  text = processes.printed_by("-m", "wrapopt.bench", "--help")
  assert "gate" in text
  assert "The staleness gate: the cost of an admitted" in text
