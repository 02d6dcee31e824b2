"""The files and cases of a target: tools/pytest_main.py, tools/cases.py."""

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

@pytest.mark.by_day(2)
@pytest.mark.parametrize("x", range(5))
def test_few(x): pass

@pytest.mark.by_day(0)
def test_late(): pass
"""


@pytest.fixture
def cases(tmp_path):
  """Runs the cases of a time: [test's name], and the status."""
  path = tmp_path / "program_test.py"
  path.write_text(PROGRAM)

  def run(*args, files=(path,), **env):
    report = tmp_path / "report.xml"
    done = run_python("tools/pytest_main.py", *map(str, files), *args,
                      pythonpath=["tools", str(tmp_path)],
                      TEST_TMPDIR=str(tmp_path), XML_OUTPUT_FILE=str(report),
                      **env)
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
  assert "test_alone" in day and "test_late" not in day
  assert [case for case in day if "few" in case] == ["test_few[0]",
                                                     "test_few[2]"]
  night, status = cases("--cases=night")
  assert status == 0
  both, _ = cases()
  assert len(both) == 12 + 3 + 4 + 1 + 5 + 1
  assert sorted(day + night) == sorted(both)


@pytest.mark.by_day(0)
def test_what_is_left_out_by_name_runs_at_night(cases):
  of_name = "-k=not (jit or row)"
  day, _ = cases("--cases=day", of_name)
  night, _ = cases("--cases=night", of_name)
  assert not [case for case in day if "jit" in case or "row" in case]
  assert sorted(day + night) == sorted(cases()[0])


def test_a_filter_finds_all_cases(cases):
  found, _ = cases("--cases=day", TESTBRIDGE_TEST_ONLY="grid and jit")
  assert len(found) == 6


@pytest.mark.by_day(0)
def test_only_the_night_may_have_no_case(cases, tmp_path):
  (tmp_path / "program_test.py").write_text("def test_alone(): pass\n")
  assert cases("--cases=night") == ([], 0)
  assert cases("--cases=day", "-k=nothing") == ([], 5)


@pytest.mark.by_day(0)
def test_files_of_a_target(cases, tmp_path):
  """Each has a process of its own, which has imported TensorFlow."""
  # Empty modules, whose import takes no time.
  (tmp_path / "wrapopt").mkdir()
  for module in "tensorflow", "wrapopt/__init__", "wrapopt/keras":
    (tmp_path / f"{module}.py").touch()
  here = "assert 'tensorflow' in sys.modules and not hasattr(sys, 'left')"
  files = []
  for name, code in (("first", f"{here}; sys.left = 1"), ("second", here),
                     ("third", "os.abort()")):
    files.append(tmp_path / f"{name}_test.py")
    files[-1].write_text(f"import os, sys\n\ndef test_{name}(): {code}\n"
                         "def test_late(): pass\n")
  run = lambda *names, **env: cases(  # pylint: disable=g-long-lambda-assignment
      "--at_night=second_test.py:late", files=names, **env)
  assert run(*files[:2]) == (["test_first", "test_late", "test_second"], 0)
  found, status = run(*files)
  assert found[-1] == "crash" and status == 1
  shard = {"TEST_SHARD_STATUS_FILE": str(tmp_path / "shards"),
           "TEST_TOTAL_SHARDS": "2"}
  assert run(*files, TEST_SHARD_INDEX="1", **shard) == (["test_second"], 0)
  assert (tmp_path / "shards").exists()
  assert run(*files[:2], TESTBRIDGE_TEST_ONLY="late") == (["test_late"] * 2, 0)
  second = "second and not late"
  assert run(*files[:2], TESTBRIDGE_TEST_ONLY=second) == (["test_second"], 0)
  files[1].write_text("def test_late(): pass\n")
  # By day each file has a case, or it would be forgotten.
  assert run(*files[:2]) == (["test_first", "test_late"], 1)
