"""Counts the tests of a `bazel test`, and exits with its status.

Usage: count_tests.py BUILD_EVENT_JSON_FILE EXIT_STATUS

Prints "N passed, N failed[, N skipped]". Each test of each target's report
counts. A target without a report counts as one failed test, and so does a
failure that no report tells of. The exit status is that of Bazel, or 1 where
Bazel had none and yet a test failed or no test passed.
"""

import collections
import json
import sys
from urllib import parse
from xml.etree import ElementTree


def reports(events):
  """Returns {target, run, shard: path of the report, or None if there is none}.

  Args:
    events: Bazel's build events, as parsed JSON.
  """
  found = {}
  for event in events:
    if event.get("configured", {}).get("testSize"):
      label = event["id"]["targetConfigured"]["label"]
      found.setdefault(label, {})
    elif "testResult" in event:
      test = event["id"]["testResult"]
      paths = [parse.unquote(parse.urlparse(output["uri"]).path)
               for output in event["testResult"].get("testActionOutput", [])
               if output["name"] == "test.xml"]
      # A later attempt of a run replaces an earlier one.
      run = test.get("run"), test.get("shard")
      found.setdefault(test["label"], {})[run] = paths[0] if paths else None
  return [path for runs in found.values() for path in runs.values() or [None]]


def count(path):
  """Returns a Counter of the outcomes in one report."""
  try:
    cases = list(ElementTree.parse(path).iter("testcase"))
  except (OSError, TypeError, ElementTree.ParseError):
    return collections.Counter(failed=1)
  def outcome(case):
    if case.find("failure") is not None or case.find("error") is not None:
      return "failed"
    return "passed" if case.find("skipped") is None else "skipped"
  return collections.Counter(map(outcome, cases))


def main():
  _, events, status = sys.argv
  with open(events, encoding="utf-8") as f:
    counts = sum(map(count, reports(map(json.loads, f))),
                 collections.Counter())
  status = int(status)
  if status and not counts["failed"]:
    counts["failed"] = 1
  line = f"{counts['passed']} passed, {counts['failed']} failed"
  if counts["skipped"]:
    line += f", {counts['skipped']} skipped"
  print(line)
  return status or int(counts["failed"] > 0 or counts["passed"] == 0)


if __name__ == "__main__":
  sys.exit(main())
