"""The measurements of the benchmark of embeddings are right."""

import contextlib
import json

import numpy as np
import pytest

from training import type_of
from wrapopt.bench import __main__ as command
from wrapopt.bench import embedding as bench
from wrapopt.bench import harness


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
  alternate = harness.alternate
  monkeypatch.setattr(
      harness, "alternate",
      lambda *args, **kwargs: alternate(*args, **kwargs, turn_seconds=1e-4))


def problem_of(optimizer="SGD"):
  return bench.make_problem(60, 5, "uniform", optimizer)


def test_command(tmp_path, capsys):
  path = tmp_path / "results.json"
  command.main(["embedding", "--quick", "--rows", "60", "--indices", "5",
                "--ids", "zipf", "--json", str(path)])
  results = json.loads(path.read_text())["results"]
  assert [(r["mode"], r["contender"]) for r in results] == [
      *((mode, contender) for mode in ("session", "function", "keras",
                                       "keras-jit")
        for contender in bench.CONTENDERS
        # Keras has no optimizer that is this op.
        if contender != "wrapopt, K = 0" or "keras" not in mode),
      ("catch-up", "catch-up"), ("catch-up", "streaming limit")]
  for r in results:
    assert r["milliseconds"] > 0 and r["rounds"] == 5 and r["rows"] == 60
    if r["contender"] == "plain":
      assert r["x_plain"] == 1
      assert (r["x_without"] is None) == ("keras" in r["mode"])
  assert results[-1]["of_limit"] == 1
  out = capsys.readouterr().out
  title, header, *rows = out.split("\n\n")[1].splitlines()
  assert title.startswith("SGD, zipf, 60 x 64: milliseconds of a step")
  assert header.split("  ")[0] == "indices, mode"
  assert [row.split("  ")[0] for row in rows] == [
      f"5, {mode}" for mode in bench.MODES if mode != "session-ref"]


def test_ref_variables():
  with bench.MODES["session-ref"](problem_of("LazyAdam")) as contest:
    bench.check(problem_of("LazyAdam"), contest)


@pytest.mark.parametrize("mode", ["function", "keras"])
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "LazyAdam"])
def test_contenders_are_what_their_names_say(mode, optimizer):
  problem = problem_of(optimizer)
  with bench.MODES[mode](problem) as contest:
    bench.check(problem, contest)
    for name, step in contest.steps.items():
      function = step.__defaults__[0] if mode == "keras" else step
      ops = [type_of(op) for op in function.get_concrete_function(
          contest.batches[0]).graph.get_operations()]
      ours = (name in ("wrapopt", "wrapopt, K = 0") or
              optimizer == "LazyAdam")
      assert sum(op.startswith("Wrapopt>SparseApply") for op in ops) == ours


def test_each_step_has_other_indices(monkeypatch):
  seen = []

  @contextlib.contextmanager
  def spy(problem):
    step = lambda batch: seen.append(id(batch))
    yield bench.Contest({"plain": step, "wrapopt": step}, problem.batches, None,
                        None, None)

  monkeypatch.setattr(bench, "MODES", {"spy": spy})
  monkeypatch.setattr(bench, "check", lambda *_: None)
  monkeypatch.setattr(bench, "_line", lambda *_: [""] * 8)
  bench.measure("SGD", "uniform", 60, [5], ["spy"], 2)
  assert len(set(seen[:8])) == 8


@pytest.mark.parametrize("ids", bench.IDS)
def test_indices(ids):
  rng = np.random.default_rng(0)
  indices = bench.IDS[ids](rng, 1000, 20_000)
  assert indices.dtype == np.int32
  assert 0 <= indices.min() and indices.max() < 1000
  counts = np.sort(np.bincount(indices, minlength=1000))[::-1] / 20_000
  if ids == "uniform":
    assert counts[0] < 3e-3
  else:
    # 1 / (r log(rows)), to within what a draw differs by.
    np.testing.assert_allclose(counts[:4], [0.1, 0.059, 0.042, 0.032],
                               atol=0.012)


def contest_of(step, is_lazy=True):
  """A Contest of one contender, in numpy, whose average decays by 0.99."""
  table, average = np.zeros([60, 64]), np.zeros([60, 64])

  def assign(n):
    table[:] = np.random.default_rng(n).random(table.shape)

  def take(batch):
    step(table, average, batch)

  return bench.Contest(
      {"wrapopt": take}, problem_of().batches, assign,
      lambda name, rows: (table[rows].copy(), average[rows].copy()),
      lambda: is_lazy)


def right(table, average, batch, rate=4.0, decay=0.99, rows=slice(None)):
  problem = problem_of()
  gradient = np.zeros_like(table)
  np.add.at(gradient, batch, 2 / 5 * (table[batch] - problem.target))
  table -= rate * gradient
  average[rows] += (1 - decay) * (table[rows] - average[rows])


def test_a_contender_that_does_other_work_is_refused():
  bench.check(problem_of(), contest_of(right))
  for step, what in (
      (lambda *args: right(*args, rate=3.9), "the table is off by"),
      (lambda *args: right(*args, decay=0.98), "the average is off by"),
      (lambda *args: right(*args, rows=args[2]), "the average is off by")):
    with pytest.raises(AssertionError, match=f"wrapopt: {what}"):
      bench.check(problem_of(), contest_of(step))
  with pytest.raises(AssertionError, match="moves in all rows"):
    bench.check(problem_of(), contest_of(right, is_lazy=False))
  with pytest.raises(AssertionError, match="other rows move"):
    bench.check(problem_of("Adagrad"), contest_of(
        lambda table, *_: np.add(table, 1, out=table)))


def test_catch_up_moves_all_rows(monkeypatch):
  catch_up, place = bench._catching_up(50)
  place()
  catch_up()
  monkeypatch.setattr(bench.ops, "catch_up", lambda *args: None)
  with pytest.raises(AssertionError, match="catch-up: the average is off by"):
    bench._catching_up(50)
