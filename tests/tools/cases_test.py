"""The cases of the day and of the night: tools/cases.py."""

import re

import pytest

from processes import run_python

PROGRAM = """
import pytest

@pytest.mark.parametrize("dtype", ["half", "float", "double"])
@pytest.mark.parametrize("rows, size", [(1, 2), (1, 3)])
@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_grid(dtype, rows, size, mode): pass

@pytest.mark.parametrize("x", [1, 1, 2])
def test_row(x): pass

@pytest.fixture(params=["a", "b"])
def kind(request): return request.param

@pytest.mark.parametrize("x", [[1], [1]])
def test_fixture(kind, x): pass

def test_alone(): pass
"""


@pytest.fixture
def cases(tmp_path):
  """Runs the cases of a time: [test's name], and the status."""
  path = tmp_path / "program_test.py"
  path.write_text(PROGRAM)

  def run(*args, **env):
    report = tmp_path / "report.xml"
    done = run_python("tools/pytest_main.py", str(path), *args,
                      pythonpath=["tools"], TEST_TMPDIR=str(tmp_path),
                      XML_OUTPUT_FILE=str(report), **env)
    return (re.findall(r'<testcase [^>]*\bname="([^"]+)"', report.read_text()),
            done.returncode)

  return run


def test_each_value_runs_by_day_and_all_others_at_night(cases):
  day, status = cases("--cases=day")
  assert status == 0
  grid = [case for case in day if "grid" in case]
  assert len(grid) == 3
  for value in "half", "float", "double", "1-2", "1-3", "eager", "jit":
    assert any(value in case for case in grid), (value, grid)
  assert sum("row" in case for case in day) == 2  # One of the equal ones.
  assert sum("fixture" in case for case in day) == 2
  assert "test_alone" in day
  night, status = cases("--cases=night")
  assert status == 0
  both, _ = cases()
  assert len(both) == 12 + 3 + 4 + 1
  assert sorted(day + night) == sorted(both)


def test_what_is_left_out_by_name_runs_at_night(cases):
  of_name = "-k=not (jit or row)"
  day, _ = cases("--cases=day", of_name)
  night, _ = cases("--cases=night", of_name)
  assert not [case for case in day if "jit" in case or "row" in case]
  assert sorted(day + night) == sorted(cases()[0])


def test_a_filter_finds_all_cases(cases):
  found, _ = cases("--cases=day", TESTBRIDGE_TEST_ONLY="grid and jit")
  assert len(found) == 6


def test_only_the_night_may_have_no_case(cases, tmp_path):
  (tmp_path / "program_test.py").write_text("def test_alone(): pass\n")
  assert cases("--cases=night") == ([], 0)
  assert cases("--cases=day", "-k=nothing") == ([], 5)
