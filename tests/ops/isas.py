"""Programs that run with each instruction set of the CPU."""

import os

import numpy as np

import numerics
from processes import printed_by
from threads import in_threads
from wrapopt import _native


def results_of(program, tmp_path):
  """{instruction set: the arrays that a program saves at sys.argv[1]}."""
  isas, results = _native.cpu_isas(), {}
  assert len(isas) > 1

  def run(isa):
    path = str(tmp_path / f"{isa}.npz")
    printed_by("-c", program, path, WRAPOPT_CPU_ISA=isa,
               pythonpath=[os.path.dirname(__file__)])
    with np.load(path) as loaded:
      results[isa] = list(loaded.values())

  in_threads(*[lambda isa=isa: run(isa) for isa in isas])
  return results


def assert_agree(results, wanted):
  """All have the same bits; of what is finite, the numbers are right.

  Args:
    results: What `results_of` gives; arrays may have their bits alone.
    wanted: For each array, its dtype and the arguments of `assert_close`.
  """
  for arrays in results.values():
    assert len(arrays) == len(wanted)
  for i, (dtype, want, tolerance) in enumerate(wanted):
    baseline = results["baseline"][i].view(dtype)
    for isa, arrays in results.items():
      numerics.assert_same_numbers(arrays[i].view(dtype), baseline, isa)
    finite = np.isfinite(want)
    numerics.assert_close(baseline[finite], want[finite], tolerance[finite])
    assert not np.isfinite(baseline[~finite].astype(np.float64)).any()
