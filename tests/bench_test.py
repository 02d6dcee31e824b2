"""The benchmarks run, and their contenders do the same work."""

import datetime
import importlib.util
import json
import os
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import processes
from training import type_of
from wrapopt.bench import __main__ as command
from wrapopt.bench import ema
from wrapopt.bench import harness
from wrapopt.bench import step

_SHAPES = [(3, 40), (5,), ()]  # 126 numbers.
_CONTENDERS = [
    "wrapopt, v1 session", "ExponentialMovingAverage, v1 session",
    "wrapopt, tf.function", "assign_sub, tf.function", "assign_sub, jit_compile"
]
_STEPS = ["stock", "stock + EMA", "wrapopt K=0", "wrapopt K=1", "wrapopt K=3"]


def test_resnet50_is_keras_resnet50_without_the_biases_of_convolutions():
  model = keras.applications.ResNet50(weights=None)
  expected = [
      tuple(w.shape)
      for layer in model.layers for w in layer.trainable_weights
      if not (isinstance(layer, keras.layers.Conv2D) and w.name == "bias")]
  shapes = harness.VARIABLE_SETS["resnet50"]
  assert sorted(shapes) == sorted(expected)
  assert len(shapes) == 161
  assert sum(harness.sizes(shapes)) == 25_557_032


def test_bert_base():
  shapes = harness.VARIABLE_SETS["bert-base"]
  assert len(shapes) == 199
  # 110 million, of which a pooler and an embedding of 30522 word pieces.
  assert sum(harness.sizes(shapes)) == 109_482_240


def test_sizes():
  assert harness.sizes([(2, 3), (), (0, 7)]) == [6, 1, 0]
  assert sum(harness.sizes(harness.VARIABLE_SETS["2x4096x4096"])) == 2**25


def test_alternate_gives_every_contender_one_turn_in_a_round(monkeypatch):
  """A clock that each call of "fast" moves by 1, of "slow" by 3 seconds."""
  now = 0
  called = []

  def contender(name, seconds):
    def call():
      nonlocal now
      now += seconds
      called.append(name)
    return call

  monkeypatch.setattr(harness.time, "perf_counter", lambda: now)
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


def test_speedup_pairs_the_rounds():
  # The second round was disturbed: both took ten times as long.
  assert harness.speedup([1., 10., 1.], [2., 20., 3.]) == 2
  assert harness.speedup([4., 4., 4.], [1., 2., 8.]) == 0.5


def test_spread():
  assert harness.spread([1., 2., 3., 4., 5.]) == pytest.approx(1 / 3)
  assert harness.spread([2., 2., 2.]) == 0
  assert harness.spread([2.]) == 0


def test_table():
  assert harness.table(("", "ms"), [("a", "1.0"), ("bcd", "10.0")]) == (
      "       ms\n"
      "a     1.0\n"
      "bcd  10.0")


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
  done = processes.run_python("-c", script)
  assert done.returncode == 0, done.stderr
  assert done.stdout.split() == [str(len(os.sched_getaffinity(0))), "7"]


@pytest.mark.parametrize("decays", [(0.999,), (0.999, 0.99, 0.9)])
def test_measure(decays, capsys):
  results = ema.measure("some", _SHAPES, decays, n_rounds=3)
  limit, *others = [r["contender"] for r in results]
  assert limit.startswith("streaming limit, ")
  assert others == _CONTENDERS
  by_name = {r["contender"]: r for r in results}
  assert by_name[limit]["of_limit"] == 1
  assert by_name["ExponentialMovingAverage, v1 session"]["of_stock"] == 1
  for r in results:
    assert (r["set"], r["averages"], r["rounds"]) == ("some", len(decays), 3)
    # Each of 126 float32 values is read, and its averages read and written.
    moved = 126 * 4 * (1 + 2 * len(decays))
    assert r["gigabytes_per_second"] * r["milliseconds"] * 1e6 == (
        pytest.approx(moved))
    assert r["spread"] >= 0 and r["of_limit"] > 0 and r["of_stock"] > 0
  title, header, *rows = capsys.readouterr().out.strip().splitlines()
  assert title.startswith(f"some: 3 variables, 126 numbers, K = {len(decays)}:")
  assert header.split() == ["ms", "+-", "GB/s", "of", "limit", "x", "stock"]
  assert [row.split("  ")[0] for row in rows] == [limit, *others]


def test_session_runs_one_native_op_on_resource_variables():
  session, contenders, place = ema._in_session(_SHAPES, (0.9, 0.5))
  with session:
    assert list(contenders) == _CONTENDERS[:2]
    types = [type_of(op) for op in session.graph.get_operations()]
    assert types.count("Wrapopt>EmaUpdate") == 1
    assert types.count("VarHandleOp") == 9
    assert "VariableV2" not in types
    # The update of each average, and nothing of ours, in the stock contender.
    assert types.count("AssignSubVariableOp") == 6
    # Numbers like any: neither zero pages nor averages that have arrived.
    variables = session.graph.get_collection(
        tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
    seen = []
    for _ in range(2):
      place()
      values = session.run([v.read_value() for v in variables])
      assert [v.shape for v in values] == _SHAPES * 3
      # The averages of a value begin alike, and not as the value is.
      for value, one, other in zip(*(values[i:i + 3] for i in (0, 3, 6))):
        np.testing.assert_array_equal(one, other)
        assert np.all(one != value)
      seen += [v.ravel() for v in values[:6]]
    flat = np.concatenate(seen)
    assert len(np.unique(flat)) > 0.99 * len(flat)


def test_functions_run_what_they_say():
  contenders, place = ema._in_functions(_SHAPES, (0.9, 0.5))
  assert list(contenders) == _CONTENDERS[2:]
  variables = contenders[
      "assign_sub, tf.function"].get_concrete_function().variables
  before = [v.numpy().copy() for v in variables]
  place()
  flat = np.concatenate(
      [v.ravel() for v in [*before, *(v.numpy() for v in variables)]])
  assert len(flat) == 2 * 3 * 126
  assert len(np.unique(flat)) > 0.99 * len(flat)
  ops = {
      name: [op.type for op in f.get_concrete_function().graph.get_operations()]
      for name, f in contenders.items()}
  assert ops["wrapopt, tf.function"].count("Wrapopt>EmaUpdate") == 1
  for name in _CONTENDERS[3:]:
    assert ops[name].count("AssignSubVariableOp") == 6
    assert "Wrapopt>EmaUpdate" not in ops[name]
  compiled = contenders["assign_sub, jit_compile"]
  assert "fusion" in compiled.experimental_get_compiler_ir()(
      stage="optimized_hlo")


@pytest.mark.parametrize("rate", [0, 0.5 - 1e-4])
def test_a_contender_that_does_other_work_is_refused(rate):
  """It does nothing, or not quite the update of decay 0.5."""
  average, value = np.float32([0.]), np.float32([1.])

  def update():
    average[:] += np.float32(rate) * (value - average)

  with pytest.raises(AssertionError,
                     match="other: the average of decay 0.5 is off by "):
    ema.check_all({"other": update}, [0.5], lambda: ([average.copy()], value))
  average[:] = 0
  rate = 0.5
  ema.check_all({"right": update}, [0.5], lambda: ([average.copy()], value))
  assert average[0] == 0.5


def test_command(monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(
      harness, "VARIABLE_SETS", {"some": _SHAPES, "others": [(7,)]})
  path = tmp_path / "results.json"
  command.main(["ema", "--quick", "--sets", "some", "--json", str(path)])
  written = json.loads(path.read_text())
  assert written["benchmark"] == "ema"
  assert written["environment"].keys() == {
      "wrapopt", "TensorFlow", "kernels", "threads", "processor", "load",
      *(["PyTorch"] if importlib.util.find_spec("torch") else [])}
  assert written["command"] == "python -m wrapopt.bench ema --quick --sets some"
  assert written["date"] == datetime.date.today().isoformat()
  assert written["machine"] in ("quiet", "busy")
  results = written["results"]
  assert len(results) == 2 * (1 + len(_CONTENDERS))
  assert {r["averages"] for r in results} == {1, 3}
  assert {r["rounds"] for r in results} == {5}
  assert {r["set"] for r in results} == {"some"}
  output = capsys.readouterr()
  assert f"TensorFlow {tf.__version__}" in output.out
  # Progress does not get into a file with the tables.
  assert "turn" not in output.out and "turn" in output.err


@pytest.mark.parametrize("before, after, machine", [
    (0.1, 0.0, "quiet"), (0.0, 0.11, "busy"), (0.11, 0.0, "busy")])
def test_command_says_whether_the_machine_is_busy(
    before, after, machine, monkeypatch, tmp_path, capsys):
  busy = [before, after]
  monkeypatch.setattr(harness, "busy_cores", lambda: busy.pop(0))
  monkeypatch.setattr(ema, "run", lambda options: [])
  path = tmp_path / "results.json"
  command.main(["ema", "--json", str(path)])
  assert json.loads(path.read_text())["machine"] == machine
  assert capsys.readouterr().out.endswith(
      f"{machine} machine: other work used {before:.2f} cores before and "
      f"{after:.2f} after\n")


def test_command_of_a_result():
  assert command._command(["keras", "--json", "a file", "--models", "a b"]) == (
      "python -m wrapopt.bench keras --models 'a b'")


def test_command_of_plain_hlo(monkeypatch):
  monkeypatch.setenv("WRAPOPT_XLA_ON_CPU", "hlo")
  assert command._command(["xla"]) == (
      "WRAPOPT_XLA_ON_CPU=hlo python -m wrapopt.bench xla")


def test_progress_is_printed_at_once(monkeypatch):
  """A pipe, unlike a terminal, shows only what is flushed."""
  read, write = os.pipe()
  os.set_blocking(read, False)
  with open(read, "rb", buffering=0) as out, open(write, "w") as pipe:
    monkeypatch.setattr(sys, "stdout", pipe)
    harness.progress("some, SGD")("built")
    assert out.read(100) == b"some, SGD: built, 0 s\n"


def test_command_without_arguments_runs_all_sets(monkeypatch):
  asked = []
  monkeypatch.setattr(ema, "measure",
                      lambda name, shapes, decays, n_rounds: asked.append(
                          (name, len(shapes), len(decays), n_rounds)) or [])
  command.main(["ema"])
  assert asked == [(name, n, k, 15)
                   for name, n in (("2x4096x4096", 2), ("resnet50", 161),
                                   ("400x256", 400), ("bert-base", 199))
                   for k in (1, 3)]


def _in_torch(optimizer):
  """The contenders of PyTorch, where that is installed."""
  if importlib.util.find_spec("torch") is None:
    return []
  kinds = ["foreach"] if optimizer == "RMSProp" else ["fused", "foreach"]
  return [("PyTorch", kind) for kind in kinds]


@pytest.mark.parametrize("optimizer, slots", [
    ("SGD", 0), ("Momentum", 1), ("Adam", 2), ("Adagrad", 1), ("RMSProp", 2)])
def test_measure_steps(optimizer, slots, capsys):
  assert set(step.OPTIMIZERS) == {"SGD", "Momentum", "Adam", "Adagrad",
                                   "RMSProp"}
  results = step.measure("some", _SHAPES, optimizer, n_rounds=3)
  graphs = "v1 session", "tf.function", "train function"
  keys = [("limit", "K=0"), ("limit", "K=1"), ("limit", "K=3"),
          *((mode, contender) for mode in graphs[:2] for contender in _STEPS),
          ("train function", "no step"),
          *((mode, contender) for mode in ("train function", "eager")
            for contender in _STEPS), *_in_torch(optimizer)]
  assert [(r["mode"], r["contender"]) for r in results] == keys
  by_key = dict(zip(keys, results))
  for (mode, contender), r in by_key.items():
    k = {"stock": 0, "stock + EMA": 1, "no step": 0, "fused": 1,
         "foreach": 1}.get(contender)
    k = int(contender[-1]) if k is None else k
    assert (r["set"], r["optimizer"], r["rounds"]) == ("some", optimizer, 3)
    # 126 gradients are read; values, slots and averages are read and written.
    moved = 126 * 4 * (1 + 2 * (1 + slots + k))
    assert r["gigabytes_per_second"] * r["milliseconds"] * 1e6 == (
        pytest.approx(moved))
    assert r["spread"] >= 0 and r["of_limit"] > 0
    if mode in graphs and contender != "no step":
      assert r["ops"] > 0 and r["build_seconds"] > 0
    assert ("adds_milliseconds" in r) == (mode == "train function")
    assert ("x_torch" in r) == (bool(_in_torch(optimizer)) and
                                mode not in ("limit", "PyTorch"))
  assert by_key["train function", "no step"]["adds_milliseconds"] == 0
  for mode in graphs:
    assert by_key[mode, "stock"]["x_stock"] == 1
    assert by_key[mode, "stock + EMA"]["x_stock_ema"] == 1
    assert (by_key[mode, "wrapopt K=1"]["ops"] <
            by_key[mode, "stock + EMA"]["ops"])
  progress, _, printed = capsys.readouterr().out.partition("\n\n")
  assert [re.fullmatch(rf"some, {optimizer}: (.*), \d+ s", line)[1]
          for line in progress.splitlines()] == [
              "v1 session built", "tf.function built", "train function built",
              "v1 session checked", "tf.function checked",
              "train function checked", "eager checked",
              *(["PyTorch started"] if _in_torch(optimizer) else []),
              "3 rounds done"]
  title, header, *rows = printed.strip().splitlines()
  assert title.startswith(f"some: 3 variables, 126 numbers, {optimizer}:")
  assert header.split() == ["ms", "+-", "GB/s", "of", "limit", "x", "stock",
                            "x", "stock+EMA", "adds", "ops", "build", "s"]
  assert [row.split("  ")[0] for row in rows] == [
      ", ".join(key) for key in keys]


def test_steps_run_one_native_op_on_resource_variables():
  session, contenders, _ = step._in_session(
      _SHAPES, step.OPTIMIZERS["Momentum"])
  with session:
    types = [type_of(op) for op in session.graph.get_operations()]
    assert types.count("Wrapopt>ApplyMomentum") == 3  # K = 0, 1, 3.
    assert "Wrapopt>EmaUpdate" not in types
    # The two stock contenders.
    assert types.count("ResourceApplyKerasMomentum") + types.count(
        "ResourceApplyMomentum") == 2 * len(_SHAPES)
    assert types.count("AssignSubVariableOp") == len(_SHAPES)
    assert "VariableV2" not in types
  functions, _ = step._in_functions(_SHAPES, step.OPTIMIZERS["Momentum"])
  assert [name for _, name in functions] == _STEPS
  for (_, name), function in functions.items():
    types = [type_of(op) for op in
             function.get_concrete_function().graph.get_operations()]
    ours = name.startswith("wrapopt")
    assert types.count("Wrapopt>ApplyMomentum") == int(ours)
    assert ("ResourceApplyMomentum" in types) == (not ours)
    assert types.count("AssignSubVariableOp") == (
        len(_SHAPES) if name == "stock + EMA" else 0)


def test_steps_begin_alike_on_new_numbers():
  _, place = step._in_functions(_SHAPES, step.OPTIMIZERS["Adam"])
  steps = step.Steps(step.OPTIMIZERS["Adam"])
  values, grads = step.variables(_SHAPES)
  for k in steps.wrappers:
    steps.apply(f"wrapopt K={k}", step._pairs(values, grads))
  steps.apply("stock + EMA", step._pairs(values, grads))
  steps.fill(values, grads)
  place()
  rows = [values, grads, *(steps.slots(values),)]
  flat = np.concatenate([v.numpy().ravel() for row in rows for v in row])
  assert len(flat) == 4 * 126 + 2
  assert len(np.unique(flat)) > 0.99 * len(flat)
  assert flat.min() >= 0.1 and flat.max() < 1
  first, *others = steps.averages(values)
  assert len(others) == 4
  for row in others:
    for a, b in zip(first, row):
      np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.parametrize("off", ["values", "slots", "averages"])
def test_a_step_that_does_other_work_is_refused(off):
  """A step that adds 1 to each number, and another that does a bit more."""
  state = {}

  def place():
    state.update(values=np.zeros(2), slots=np.zeros(2),
                 averages=np.zeros((5, 2)))

  def take(rows, extra):
    state["values"] += 1 + extra.get("values", 0)
    state["slots"] += 1 + extra.get("slots", 0)
    for row, decay in rows:
      state["averages"][row] += ((1 - decay) *
                                 (state["values"] - state["averages"][row]) +
                                 extra.get("averages", 0))

  contenders = {
      ("mode", "stock"): lambda: take([], {}),
      ("mode", "wrapopt K=1"): lambda: take([(1, 0.999)], extra)}
  sample = lambda: [state["values"], state["slots"], *state["averages"]]
  extra = {}
  step.check_all(contenders, place, sample)
  extra = {off: 1e-4}
  with pytest.raises(AssertionError,
                     match=f"mode, wrapopt K=1: the {off} are off by 0.0001"):
    step.check_all(contenders, place, sample)


def test_step_command(monkeypatch, tmp_path):
  monkeypatch.setattr(
      harness, "VARIABLE_SETS", {"some": _SHAPES, "others": [(7,)]})
  path = tmp_path / "results.json"
  command.main(["step", "--quick", "--sets", "some", "--optimizers", "SGD",
                "--modes", "v1 session", "eager", "--json", str(path)])
  results = json.loads(path.read_text())["results"]
  assert [r["mode"] for r in results] == (
      3 * ["limit"] + len(_STEPS) * ["v1 session"] + len(_STEPS) * ["eager"])
  assert {r["optimizer"] for r in results} == {"SGD"}


@pytest.mark.parametrize("args,error", [
    (["step", "--optimizers", "Adamax"],
     "argument --optimizers: invalid choice: 'Adamax'"),
    ([], "the following arguments are required: NAME"),
    (["emu"], "invalid choice: 'emu'"),
    (["ema", "--sets", "vgg"], "argument --sets: invalid choice: 'vgg'"),
    (["ema", "--json", "/no/such/folder/f"],
     "argument --json: cannot write /no/such/folder/f: "
     "No such file or directory"),
])
def test_command_errors(args, error, capsys, monkeypatch):
  for benchmark in (ema, step):
    monkeypatch.setattr(benchmark, "run",
                        lambda options: pytest.fail("it ran"))
  with pytest.raises(SystemExit) as e:
    command.main(args)
  assert e.value.code == 2
  assert error in capsys.readouterr().err


def test_help_of_the_command():
  done = processes.run_python("-m", "wrapopt.bench", "--help")
  assert done.returncode == 0, done.stderr
  assert "ema" in done.stdout
  assert "Exponential moving averages of many variables" in done.stdout
