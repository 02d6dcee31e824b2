"""Runs pytest for one Bazel test target."""

import os
import sys

import pytest

import cases


def main():
  args = list(sys.argv[1:])
  xml = os.environ.get("XML_OUTPUT_FILE")
  if xml:
    args.append(f"--junitxml={xml}")
  only = os.environ.get("TESTBRIDGE_TEST_ONLY")  # bazel test --test_filter=...
  if only:
    args += [f"-k={only}", "--cases=all"]
  scratch = os.environ.get("TEST_TMPDIR")
  if scratch:
    args.append(f"--basetemp={scratch}/pytest")
    # Tests must not depend on files in the user's home, such as Matplotlib's
    # list of fonts.
    os.environ["HOME"] = os.environ["MPLCONFIGDIR"] = scratch
  # The runfiles tree is read-only.
  args += ["-p", "no:cacheprovider", "--rootdir", os.getcwd(), "-q", "-rs"]
  status = pytest.main(args, plugins=[cases.Cases()])
  # The night may have no case that the day has not.
  return 0 if "--cases=night" in args and (
      status == pytest.ExitCode.NO_TESTS_COLLECTED) else status


if __name__ == "__main__":
  sys.exit(main())
