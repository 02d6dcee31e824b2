"""The measurements of the benchmark of averages are right."""

import json

import numpy as np
import pytest

from wrapopt.bench import __main__ as command
from wrapopt.bench import average
from wrapopt.bench import harness

_SHAPES = [(3, 7), (5,), (100,)]
_OPS = ["wrapopt", "tf.add_n, assign"]
_ROUNDS = ["wrapopt", "accumulators"]
_STEPS = ["GradientDescent", "ModelAverage", "ElasticAverage"]


def test_contenders_are_what_their_names_say():
  session, contenders, place = average._in_session(_SHAPES, 4)
  with session:
    assert list(contenders) == _OPS
    types = [op.type for op in session.graph.get_operations()]
    assert types.count("Wrapopt>AveragingAssign") == 1
    assert types.count("AddN") == len(_SHAPES)
    (op,) = [op for op in session.graph.get_operations()
             if op.type == "Wrapopt>AveragingAssign"]
    assert (op.get_attr("NT"), op.get_attr("NS")) == (3, 12)
    place()
    for contender in contenders.values():
      contender()


def test_the_limit_reads_and_writes_as_many_arrays():
  limits, place = average._limits(_SHAPES, 4)
  place()
  assert len(limits) == len({1, harness.threads()})
  assert all(run() > 0 for run in limits.values())
  read, written = harness.streams(_SHAPES, 1, 4)
  assert (len(read), len(written)) == (4, 1)
  assert average.StreamLimit(read, written).bytes == 126 * 4 * (4 + 2)


def test_a_contender_that_does_other_work_is_refused():
  sources = [np.full(3, x) for x in (0.25, 0.75)]
  target = np.zeros(3)

  def state():
    return [np.array(x) for x in (target, *sources)]

  def assign(value, source=0.25):
    def run():
      target[:] = value
      sources[0][:] = source
    return run

  def reset():
    target[:] = 0
    sources[0][:] = 0.25

  average.check_means({"mean": assign(0.5)}, state, reset)
  for bad, text in ((assign(0.25), "the mean is off by 0.25"),
                    (lambda: None, "the mean is off by 0.5"),
                    (assign(0.5, 0.5), "a source is off by 0.25")):
    with pytest.raises(AssertionError, match=f"bad: {text}"):
      average.check_means({"bad": bad}, state, reset)


def test_a_round_that_gives_something_else_is_refused():
  before = [np.zeros(2), np.ones(2)]

  def answers(weights, center):
    return [([b, b], [weights, center]) for b in before]

  half, other = np.full(2, 0.5), np.full(2, 0.25)
  average.check_round_of("round", answers(half, half))
  with pytest.raises(AssertionError, match="round: a weight is off by 0.25"):
    average.check_round_of("round", answers(other, half))
  with pytest.raises(AssertionError, match="round: a center is off by 0.25"):
    average.check_round_of("round", answers(half, other))


def test_command(monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(harness, "VARIABLE_SETS",
                      {"some": 3 * _SHAPES, "2x4096x4096": [], "resnet50": [],
                       "400x256": []})
  path = tmp_path / "results.json"
  command.main(["average", "--quick", "--sets", "some", "--json", str(path)])
  results = json.loads(path.read_text())["results"]
  ops = [r for r in results if r["part"] == "op"]
  rounds = [r for r in results if r["part"] == "round"]
  assert [r["sources"] for r in ops] == 3 * [2] + 3 * [4] + 3 * [8]
  for row in range(0, 9, 3):
    limit, *contenders = ops[row:row + 3]
    assert limit["contender"].startswith("streaming limit, ")
    assert limit["of_limit"] == 1
    assert [r["contender"] for r in contenders] == _OPS
    assert contenders[1]["of_add_n"] == 1
  assert [r["contender"] for r in rounds] == _ROUNDS
  native, stock = rounds
  assert stock["of_accumulators"] == 1
  # Each of two workers sends its weights, and gets the centers.
  least = 2 * 2 * 378 * 4 / 1e6
  for r in rounds:
    assert least <= r["megabytes"] < 2 * least
  assert native["transfers"] < stock["transfers"]
  assert stock["transfers"] >= 2 * 2 * 3 * len(_SHAPES)
  steps = [r for r in results if r["part"] == "step"]
  assert [r["contender"] for r in steps] == _STEPS
  inner, *averaging = steps
  assert inner["milliseconds_more"] == inner["ps_nodes"] == inner["calls"] == 0
  assert inner["worker_nodes"] >= 3 * 9
  for r in averaging:
    assert r["worker_nodes"] > inner["worker_nodes"] and r["ps_nodes"] > 0
    calls = {"ModelAverage": 4, "ElasticAverage": 3}[r["contender"]]
    assert (r["calls"], r["bytes"]) == (calls, 0)
  assert {r["rounds"] for r in results} == {5}
  lines = capsys.readouterr().out.strip().splitlines()
  assert "some: 9 variables, 378 numbers, S = 8: 0.0 MB a pass" in lines
  title = lines.index("some: 9 variables, 378 numbers, a round of 2 workers "
                      "and a parameter server")
  assert lines[title + 1].split() == ["ms", "+-", "x", "accumulators",
                                      "transfers", "MB"]
  assert [row.split("  ")[0] for row in lines[title + 2:title + 4]] == _ROUNDS
  title = lines.index("some: 9 variables, a step between rounds of a worker "
                      "and a parameter server")
  assert [row.split("  ")[0] for row in lines[title + 2:-2]] == _STEPS
