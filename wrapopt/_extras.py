"""Packages that only the examples, benchmarks and commands need."""

import importlib


def load(module):
  """Imports `module` of an optional package.

  Args:
    module: Its full name, such as "sklearn.datasets".

  Returns:
    The module.

  Raises:
    SystemExit: If the package is not installed. The message says how to install
      it.
  """
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as e:
    package = module.split(".")[0]
    if e.name is None or e.name.split(".")[0] != package:
      raise
    raise SystemExit(
        f"The examples, benchmarks and commands need the Python module "
        f"'{package}', which is not installed. Install it and what else they "
        "need with: pip install matplotlib scikit-learn tqdm") from None
