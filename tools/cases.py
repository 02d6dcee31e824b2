"""Which cases of a grid of tests run by day, and which ones at night."""

import collections

import pytest


class Cases:
  """Leaves the cases of the day (`--cases=day`), or the others (`night`).

  By day, each value of each parameter of a test runs at least once, with as few
  cases as that takes. All cases of a test with one parameter run. The mark
  `by_day(n)` limits the cases of a test to n.
  """

  def pytest_addoption(self, parser):
    parser.addoption("--cases", choices=["all", "day", "night"], default="all")

  @pytest.hookimpl(wrapper=True)
  def pytest_collection_modifyitems(self, config, items):
    collected = list(items)
    yield  # Then -k has left some of them.
    cases = config.getoption("cases")
    if cases == "all":
      return
    of_day = _of_day(items)
    items[:] = [item for item in collected
                if (item in of_day) == (cases == "day")]


def _of_day(items):
  """Some of the items, with all values of all parameters."""
  tests = collections.defaultdict(dict)
  for item in items:
    tests[item.nodeid.partition("[")[0]][item] = _values(item)
  chosen = set()
  for cases in tests.values():
    missing = set.union(*cases.values())
    of_test = set() if missing else set(cases)
    while missing:
      case = max(cases, key=lambda case: len(cases[case] & missing))  # pylint: disable=cell-var-from-loop
      missing -= cases[case]
      of_test.add(case)
    of_test = [case for case in cases if case in of_test]
    mark = of_test[0].get_closest_marker("by_day")
    most = min(len(of_test), mark.args[0] if mark else len(of_test))
    # Those left are spread over the grid.
    chosen.update(of_test[i * len(of_test) // most] for i in range(most))
  return chosen


def _values(item):
  """Which values a case has: those of names with one mark are one."""
  params = getattr(item, "callspec", None) and item.callspec.params or {}
  marks = [mark.args[0] for mark in item.iter_markers("parametrize")]
  marks = [mark.replace(",", " ").split() if isinstance(mark, str) else mark
           for mark in marks]
  marks += [[name] for name in params if not any(name in m for m in marks)]
  return {tuple((name, id(params[name])) for name in names) for names in marks}
