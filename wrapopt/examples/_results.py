"""Writes the results of an example."""

import json
import os
import platform

import wrapopt


def write(out, results, *packages):
  """Writes results.json, with the versions of packages.

  Args:
    out: A folder.
    results: A dict.
    *packages: The packages whose versions are written, besides wrapopt.

  Returns:
    The path of the file.
  """
  results = {
      **results,
      "versions": {
          **{p.__name__: p.__version__ for p in (wrapopt, *packages)},
          "python": platform.python_version(),
      },
      "wrapopt_path": os.path.dirname(os.path.abspath(wrapopt.__file__)),
  }
  path = os.path.join(out, "results.json")
  with open(path, "w", encoding="utf-8") as f:
    json.dump(results, f, indent=2)
    f.write("\n")
  return path
