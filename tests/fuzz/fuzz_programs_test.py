"""Random programs that train with wrappers give what a NumPy model says.

`fuzz_programs.py` runs more of them.
"""

import sys

import pytest

import fuzz_programs
import processes
import programs
import programs_code
import programs_model
import wrapopt
import wrapopt.keras as wk
from wrapopt._averages import _lazy
from wrapopt._averages import _swap
from wrapopt._v1._evaluation import _swapping_saver
from wrapopt.keras._averages import _assignments

# How many programs of each kind the daily test runs, in some 10 seconds.
EXAMPLES = {("keras", "eager"): 12, ("keras", "function"): 4,
            ("keras", "fit"): 4, ("keras", "jit"): 2, ("v1", "eager"): 8,
            ("v1", "function"): 4, ("v1", "resource"): 4, ("v1", "ref"): 4,
            ("v1", "jit"): 2}


def assert_right(failure):
  assert failure is None, (
      f"\n{failure.__cause__}\n\n{programs_code.printed(failure.code)}")


@pytest.mark.parametrize("api, mode", [
    (api, mode) for api, modes in programs.MODES.items() for mode in modes])
def test_programs(api, mode):
  counts = fuzz_programs.Counts()
  assert_right(fuzz_programs.find(EXAMPLES[api, mode], counts,
                                  programs.programs(api, mode)))
  assert counts.of["all"] >= EXAMPLES[api, mode] // 2


# (t, trained, lag).
_STEPS = tuple((t, (True, True), 0) for t in (1, 2, 3))
_VARIABLES = (programs.Variable((2,), "float64"),
              programs.Variable((4, 1), "float64", True))
_DECAYS = {"decays": (0.5, "power_1"), "warm_up": False}


def program(api, mode, name, options, *operations, inner=None):
  return programs.Program(
      api, mode, _VARIABLES,
      (inner or {"keras": "SGD", "v1": "GradientDescent"}[api], {}),
      ((name, options),), operations)


# What wrappers of tf.compat.v1 have in each chain.
_OF_WRAPPERS = {
    programs.MOVING: {"decays": (0.5, "power_1"), "warm_up": True,
                      "shadow": False, "lazy": None, "fused": None},
    programs.GATE: {"policy": "scale", "fused": None},
    programs.ELASTIC: {"period": 2, "rate": 0.25},
    programs.MODEL: {"period": 2},
    programs.PRIMAL[1]: {"momentum": 0.5, "decay": 0.5},
    programs.FREE[1]: {"momentum": 0.5, "warm_up": 2, "power": 2, "r": 1}}
_LAGS = (0, 3, 2, 0, 5, 1, 0, 0)
_ALL_KINDS = (*_VARIABLES, programs.Variable((), "float32"),
              programs.Variable((0, 3), "float16"),
              programs.Variable((2,), "bfloat16"))


def chains(length):
  return [(chain, mode) for mode in programs.MODES["v1"][:-1]
          for chain in programs.chains("v1", mode in programs.SESSIONS)
          if len(chain) == length]


def take_all(chain, mode, fused, inner="GradientDescent"):
  """Steps of each lag, after each of which all there is is read."""
  options = {name: dict(_OF_WRAPPERS.get(name, {})) for name in chain}
  for of in options.values():
    if "fused" in of:
      of["fused"] = fused
  operations = [x for t, lag in enumerate(_LAGS) for x in (
      ("steps", ((t, (True,) * len(_ALL_KINDS), lag),)), ("read",))]
  fuzz_programs.run(programs.Program(
      "v1", mode, _ALL_KINDS, (inner, {}),
      tuple(options.items()), tuple(operations)))


@pytest.mark.by_day(8)
@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("chain, mode", chains(2))
def test_chains(chain, mode, fused):
  take_all(chain, mode, fused)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("mode", programs.MODES["v1"][:-1])
@pytest.mark.parametrize("inner", ["Momentum", "Adam"])
def test_a_gate(inner, mode, fused):
  take_all((programs.GATE,), mode, fused, inner)


@pytest.mark.parametrize("chain, mode", chains(3))
def test_chains_of_three(chain, mode):
  take_all(chain, mode, None)


def test_a_program_by_hand():
  """1 - 0.5 x 1 in the variable, and half of the way in the average."""
  model = programs_model.Model(program(
      "v1", "eager", programs.MOVING,
      {**_DECAYS, "shadow": False, "fused": None, "lazy": None}))
  value = model.values[0].copy()
  g = programs_model.gradient(model.program, 1, 0).sum
  model.take((1, (True, True), 0))
  assert (model.values[0] == value - 0.5 * g).all()
  assert (model.average(programs.MOVING, 0, 0) == value - 0.25 * g).all()
  assert (model.average(programs.MOVING, 1, 0) == model.values[0]).all()


def test_a_printed_program_runs_by_itself(tmp_path):
  code = programs_code.printed(programs_code.code_of(program(
      "keras", "eager", "SWA",
      {"start": 0, "period": 1, "sum": False, "keep": False},
      ("steps", _STEPS), ("swap", 0, 0, "error"))))
  for text, returncode in (code, 0), (code + 'check("no", 0, 1)\n', 1):
    (tmp_path / "program.py").write_text(text)
    done = processes.run_python(str(tmp_path / "program.py"),
                                pythonpath=sys.path)
    assert done.returncode == returncode, done.stderr


# Defects, and the programs that find them.


def _wrong_rate(monkeypatch):
  monkeypatch.setattr(wk.MovingAverage, "_decays_now", _changed(
      wk.MovingAverage._decays_now, lambda decays: [d * 0.999 for d in decays]))


def _changed(method, change):
  return lambda *args, **kwargs: change(method(*args, **kwargs))


def _not_put_back(monkeypatch):
  def swap_out(self):
    """The averages get the raw weights, and the variables keep the averages."""
    self._aside.give_back()
    _swap._occupied.remove(self._variables)

  monkeypatch.setattr(_swap.SwappedIn, "swap_out", swap_out)


def _stale_gradient_is_applied(monkeypatch):
  gate = wrapopt.ops.staleness_gate
  monkeypatch.setattr(
      wrapopt.ops, "staleness_gate",
      lambda step, counter, histogram, recorded, limit, **options: gate(
          step, counter, histogram, recorded, limit + 1, **options))


def _averages_are_not_loaded(monkeypatch):
  monkeypatch.setattr(_assignments, "load", lambda average, variable, value:
                      _assignments.seed(average, variable))


def _rows_do_not_catch_up(monkeypatch):
  monkeypatch.setattr(_lazy.LazyAverage, "catch_up",
                      lambda self, indices=None: None)


def _names_are_not_swapped(monkeypatch):
  monkeypatch.setattr(_swapping_saver, "_swap",
                      lambda pairs, named, keys: named)


DEFECTS = {
    _wrong_rate: ("keras", "eager"),
    _not_put_back: ("v1", "eager"),
    _stale_gradient_is_applied: ("v1", "eager"),
    _averages_are_not_loaded: ("keras", "fit"),
    _rows_do_not_catch_up: ("v1", "eager"),
    _names_are_not_swapped: ("v1", "resource"),
}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda f: f.__name__.strip("_"))
def test_finds_a_defect(defect, monkeypatch):
  api, mode = DEFECTS[defect]
  defect(monkeypatch)
  counts = fuzz_programs.Counts()
  # The first one that shows it is the last.
  failure = fuzz_programs.find(10 * EXAMPLES[api, mode], counts,
                               programs.programs(api, mode), shrink=False)
  print(counts.of["all"], failure and repr(failure.__cause__)[:300])
  # Other errors may be of the defect itself.
  assert failure is not None and isinstance(failure.__cause__, AssertionError)
