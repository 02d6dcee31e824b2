"""`python -m wrapopt`."""

import re

import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels
from tensorflow.python.util import pywrap_xla_ops

import wrapopt
from processes import printed_by
from wrapopt import _native


def run(**env):
  return printed_by("-m", "wrapopt", **env)


@pytest.fixture(scope="module")
def out():
  return run()


def test_versions_and_build_facts(out):
  assert out.startswith(f"wrapopt {wrapopt.__version__}\n")
  assert f"  library      {wrapopt.sysconfig.get_lib()}\n" in out
  # TensorFlow itself writes 2.22.0-rc0, pip 2.22.0rc0.
  version = tf.__version__.replace("-", "")
  assert re.search(rf"  built for    TensorFlow {version}, C\+\+ ABI "
                   rf"{tf.sysconfig.CXX11_ABI_FLAG}, absl \w+\n", out)
  assert re.search(r"  built with   g\+\+ \d+\.\d+", out)
  assert f"  runs on      TensorFlow {tf.__version__}, Python 3." in out


def test_ops_and_their_devices(out):
  table = out.split("devices that have kernels\n")[1]
  rows = dict(line.split(maxsplit=1) for line in table.splitlines())
  assert {"Wrapopt>EmaUpdate", "Wrapopt>EmaUpdateRef", "Wrapopt>Exchange",
          "Wrapopt>ExchangeRef"} <= rows.keys()
  pywrap_xla_ops.get_cpu_kernel_names()  # Makes XLA's kernels here, too.
  for op, devices in rows.items():
    registered = kernels.get_registered_kernels_for_op(op).kernel
    assert devices == ", ".join(sorted({k.device_type for k in registered}))
    assert "CPU" in devices
  assert rows["Wrapopt>EmaUpdate"].startswith("CPU, GPU, XLA_CPU_JIT, ")
  assert rows["Wrapopt>EmaUpdateRef"] == "CPU, GPU"


def test_the_gpu_kernels(out):
  assert ("  GPU kernels  sm_60, sm_70, sm_80, sm_90, sm_100, sm_120, "
          "sm_70 large, ") in out
  assert ", sm_120 program, compute_90 large, compute_90 program\n" in out
  assert re.search(r"  GPU( \d+)? +\S", out)


@pytest.mark.by_day(0)
def test_the_instruction_set_in_use(out):
  isas = ", ".join(_native.cpu_isas())
  assert f"  CPU kernels  {_native.cpu_isa()}, chosen from {isas}\n" in out
  assert f"  CPU kernels  baseline, chosen from {isas}\n" in run(
      WRAPOPT_CPU_ISA="baseline", TF_USE_LEGACY_KERAS="1")
