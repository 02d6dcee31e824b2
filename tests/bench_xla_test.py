"""The measurements of the benchmark of XLA are right."""

import json

import pytest

from wrapopt.bench import __main__ as command
from wrapopt.bench import harness
from wrapopt.bench import xla

_SHAPES = [(3, 7), (5,), (100,)]
_CONTENDERS = ["stock", "stock + EMA", "wrapopt K=0", "wrapopt K=1"]


def test_contenders_are_compiled_and_what_their_names_say():
  contenders, _, _ = xla.compiled(_SHAPES, "Momentum")
  assert list(contenders) == _CONTENDERS
  for name, function in contenders.items():
    hlo = function.experimental_get_compiler_ir()("hlo")
    ours = name.startswith("wrapopt")
    assert ('op_type="Wrapopt>Apply"' in hlo) == ours
    assert ('op_type="ResourceApplyMomentum"' in hlo) == (not ours)
    # Variables and slots, and the averages where there are some.
    averages = name in ("stock + EMA", "wrapopt K=1")
    assert hlo.split("\n", 1)[0].count("may-alias") == (
        len(_SHAPES) * (2 + averages))


def test_instructions_are_counted():
  hlo = """HloModule m

%fused (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %add.1 = f32[2]{0} add(%p, %p)
}

ENTRY %main (arg: f32[2]) -> f32[2] {
  %arg = f32[2]{0} parameter(0), metadata={op_name="x = y"}
  ROOT %fusion = f32[2]{0} fusion(%arg), kind=kLoop, calls=%fused
}
"""
  assert xla.count_instructions(hlo) == 4


@pytest.mark.parametrize("optimizer", ["Momentum", "Adam"])
def test_command(optimizer, monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(harness, "VARIABLE_SETS", {"some": _SHAPES})
  path = tmp_path / "results.json"
  command.main(["xla", "--quick", "--sets", "some", "--optimizers", optimizer,
                "--json", str(path)])
  results = json.loads(path.read_text())["results"]
  assert [r["contender"] for r in results] == _CONTENDERS
  assert [r["x_peer"] == 1 for r in results] == [True, True, False, False]
  for r in results:
    assert r["rounds"] == 5 and r["optimizer"] == optimizer
    assert min(r["trace_seconds"], r["compile_seconds"]) > 0
    assert r["hlo"] > 0 and r["optimized_hlo"] > 0
  # XLA makes as small a program of ours.
  assert results[3]["optimized_hlo"] <= results[1]["optimized_hlo"]
  title, header, *rows = capsys.readouterr().out.strip().splitlines()[2:-2]
  assert title == f"some: 3 variables, 126 numbers, {optimizer}"
  assert header.split() == ["ms", "+-", "x", "of", "trace", "s", "compile", "s",
                            "HLO"]
  assert [row.split("  ")[0] for row in rows] == _CONTENDERS
