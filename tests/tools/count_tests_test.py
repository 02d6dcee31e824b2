"""The last line of ./tools/test counts every failure."""

import json

import pytest

from processes import run_python

GREEN = """<testsuites><testsuite><testcase/><testcase/></testsuite>
<testsuite><testcase><skipped/></testcase></testsuite></testsuites>"""
RED = """<testsuites><testsuite><testcase><failure/></testcase><testcase/>
<testcase><error/></testcase></testsuite></testsuites>"""
EMPTY = "<testsuites><testsuite/></testsuites>"


@pytest.fixture
def count(tmp_path):
  """A function that counts reports: (last line, exit status)."""

  def configured(label):
    return {"id": {"targetConfigured": {"label": label}},
            "configured": {"testSize": "MEDIUM"}}

  def result(label, attempt, report):
    path = tmp_path / f"{label}-{attempt}.xml"
    outputs = [{"name": "test.log", "uri": "file:///none"}]
    if report is not None:
      path.write_text(report)
      outputs.append({"name": "test.xml", "uri": path.as_uri()})
    return {"id": {"testResult": {"label": label, "run": 1, "shard": 1,
                                  "attempt": attempt}},
            "testResult": {"testActionOutput": outputs}}

  def run(attempts_of, status):
    # A library is configured too, and is no test.
    events = [{"id": {"targetConfigured": {"label": "lib"}}, "configured": {}}]
    events += [configured(label) for label in attempts_of]
    events += [result(label, i, report)
               for label, reports in attempts_of.items()
               for i, report in enumerate(reports)]
    path = tmp_path / "events.json"
    path.write_text("".join(json.dumps(e) + "\n" for e in events))
    process = run_python("tools/count_tests.py", str(path), str(status))
    return process.stdout.splitlines()[-1], process.returncode

  return run


@pytest.mark.parametrize("attempts_of, status, line, exit_status", [
    ({"a": [GREEN], "b b": [GREEN]}, 0, "4 passed, 0 failed, 2 skipped", 0),
    ({"a": [GREEN], "b": [RED]}, 3, "3 passed, 2 failed, 1 skipped", 3),
    ({"a": [RED, GREEN]}, 0, "2 passed, 0 failed, 1 skipped", 0),
    # A report that Bazel did not believe, or none.
    ({"a": [GREEN]}, 3, "2 passed, 1 failed, 1 skipped", 3),
    ({"a": [RED]}, 0, "1 passed, 2 failed", 1),
    ({"a": [GREEN], "b": [None]}, 3, "2 passed, 1 failed, 1 skipped", 3),
    ({"a": [GREEN], "b": ["<cut"]}, 3, "2 passed, 1 failed, 1 skipped", 3),
    ({"a": [GREEN], "b": []}, 1, "2 passed, 1 failed, 1 skipped", 1),
    # Nothing ran.
    ({}, 1, "0 passed, 1 failed", 1),
    ({}, 0, "0 passed, 0 failed", 1),
    ({"a": [EMPTY]}, 0, "0 passed, 0 failed", 1),
])
def test_count(count, attempts_of, status, line, exit_status):
  assert count(attempts_of, status) == (line, exit_status)
