"""Runs pytest for one Bazel test target.

Each file of a target with several runs in a child, which has imported
TensorFlow already: what it leaves in its process is seen by no other file. If
the target has shards, each runs some of the files. By day, Python's
collector of garbage is off: a file ends before garbage fills the memory.
"""

import gc
import os
import pathlib
import sys
from xml.etree import ElementTree

import pytest

import cases


def main():
  gc.disable()  # With the collector, imports take a quarter longer.
  files, options, at_night = [], [], {}
  for arg in sys.argv[1:]:
    if arg.startswith("--at_night="):
      file, expression = arg.partition("=")[2].split(":", 1)
      at_night[file] = f"-k=not ({expression})"
    else:
      (options if arg.startswith("-") else files).append(arg)
  only = os.environ.get("TESTBRIDGE_TEST_ONLY")  # bazel test --test_filter=...
  if only:
    options += [f"-k={only}", "--cases=all"]
    at_night = {}
  scratch = os.environ.get("TEST_TMPDIR")
  if scratch:
    options.append(f"--basetemp={scratch}/pytest")
    # Tests must not depend on files in the user's home, such as Matplotlib's
    # list of fonts.
    os.environ["HOME"] = os.environ["MPLCONFIGDIR"] = scratch
  # The runfiles tree is read-only.
  options += ["-p", "no:cacheprovider", "--rootdir", os.getcwd(), "-q", "-rs"]
  if "--cases=day" in options:
    # This plugin collects garbage at the end.
    options.append("-pno:unraisableexception")
  report = os.environ.get("XML_OUTPUT_FILE")
  if report:
    options.append(f"--junitxml={report}")

  def run(file):
    if "--cases=day" not in options:
      gc.enable()
    expression = at_night.get(os.path.basename(file))
    return pytest.main([file, *options, *([expression] if expression else [])],
                       plugins=[cases.Cases()])

  if len(files) == 1:
    status = run(*files)
    # The night may have no case that the day has not.
    return 0 if "--cases=night" in options and (
        status == pytest.ExitCode.NO_TESTS_COLLECTED) else status

  shards = os.environ.pop("TEST_SHARD_STATUS_FILE", None)
  if shards:
    pathlib.Path(shards).touch()
    files = files[int(os.environ["TEST_SHARD_INDEX"])::
                  int(os.environ["TEST_TOTAL_SHARDS"])]
  # pylint: disable=g-import-not-at-top,unused-import
  import tensorflow
  import wrapopt.keras
  failed, reports = False, ElementTree.Element("testsuites")
  for file in files:
    print(file, flush=True)
    child = os.fork()
    if not child:
      status = run(file)
      sys.stdout.flush()
      # Python may take a minute to free what is left.
      os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # Only a filter may leave a file without cases.
    failed |= status != 0 and not (
        only and status == pytest.ExitCode.NO_TESTS_COLLECTED)
    if report:
      reports.extend(_cases(report, file, status))
  if report:
    ElementTree.ElementTree(reports).write(report)
  return failed


def _cases(report, file, status):
  """The elements of a file's report; of a crash if there is none."""
  try:
    found = [*ElementTree.parse(report).getroot()]
    os.remove(report)
    return found
  except FileNotFoundError:
    case = ElementTree.Element("testcase", classname=file, name="crash")
    ElementTree.SubElement(case, "error", message=f"exit status {status}")
    return [case]


if __name__ == "__main__":
  sys.exit(main())
