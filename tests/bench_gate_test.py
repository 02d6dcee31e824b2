"""The measurements of the benchmark of the gate are right."""

import json

import numpy as np
import pytest

from training import type_of
from wrapopt.bench import __main__ as command
from wrapopt.bench import gate
from wrapopt.bench import harness

_SHAPES = [(3, 7), (5,), (100,)]
_CONTENDERS = [
    "ungated, one op", "gated, admitted", "ungated, stock",
    "tf.cond around stock, admitted", "gated, dropped",
    "tf.cond around stock, dropped"]


def test_contenders_are_what_their_names_say():
  session, contenders, place = gate._in_session(_SHAPES)
  with session:
    assert list(contenders) == _CONTENDERS
    types = [type_of(op) for op in session.graph.get_operations()]
    assert types.count("Wrapopt>ApplyMomentum") == 3
    assert types.count("Wrapopt>StalenessGate") == 2
    # Those of the conds are in functions.
    assert types.count("ResourceApplyMomentum") == len(_SHAPES)
    place()
    step = session.graph.get_tensor_by_name("global_step/Read/ReadVariableOp:0")
    before = session.run(step)
    for contender in contenders.values():
      contender()
    assert session.run(step) - before == 4


def test_a_contender_that_does_other_work_is_refused():
  state = [np.ones(3), np.ones(3), np.ones(3)]

  def step():
    state[1] = 0.9 * state[1] + state[2]
    state[0] = state[0] - 1e-3 * state[1]

  gate.check_all({"gated, admitted": step}, lambda: state)
  with pytest.raises(AssertionError, match="dropped: weights are off by"):
    gate.check_all({"gated, dropped": step}, lambda: list(state))
  with pytest.raises(AssertionError, match="admitted: weights are off by"):
    gate.check_all({"gated, admitted": lambda: None}, lambda: state)


def test_command(monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(harness, "VARIABLE_SETS", {"some": _SHAPES})
  path = tmp_path / "results.json"
  command.main(["gate", "--quick", "--sets", "some", "--json", str(path)])
  results = json.loads(path.read_text())["results"]
  assert [r["contender"] for r in results] == _CONTENDERS
  assert results[0]["of_ungated"] == 1 and results[2]["of_stock"] == 1
  assert results[3]["of_cond"] == 1
  assert {r["rounds"] for r in results} == {5}
  title, header, *rows = capsys.readouterr().out.strip().splitlines()[2:-2]
  assert title == "some: 3 variables, 126 numbers"
  assert header.split() == ["ms", "+-", "x", "ungated", "x", "stock", "x",
                            "tf.cond"]
  assert [row.split("  ")[0] for row in rows] == _CONTENDERS
