"""`python -m wrapopt` prints versions, kernels, GPUs and ops."""

import platform

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import op_def_pb2
from tensorflow.python.client import pywrap_tf_session as c_api
from tensorflow.python.framework import kernels
from tensorflow.python.util import pywrap_xla_ops

from wrapopt import _native
from wrapopt import sysconfig


def devices_of_kernels():
  """Returns {op: [types of device that have a kernel]} of wrapopt's ops."""
  # Registers the kernels of all XLA devices, as the first compilation does.
  pywrap_xla_ops.get_cpu_kernel_names()
  registered = op_def_pb2.OpList.FromString(
      c_api.TF_GetBuffer(c_api.TF_GetAllOpList()))
  return {
      op.name: sorted({
          kernel.device_type
          for kernel in kernels.get_registered_kernels_for_op(op.name).kernel})
      for op in registered.op if op.name.startswith("Wrapopt>")}


def _gpus():
  """Returns {"GPU 0": description} of this machine's GPUs."""
  try:
    gpus = _native.gpus()
  except RuntimeError as e:
    return {"GPU": f"none: {e}"}
  return {
      f"GPU {i}": (f"{name}, compute capability {capability}, driver for CUDA "
                   f"{driver}: {', '.join(images) or 'no kernels for it'}")
      for i, (name, capability, driver, images) in enumerate(gpus)
  } or {"GPU": "none"}


def main():
  facts = {
      "library": sysconfig.get_lib(),
      "built for": "; ".join(
          f"TensorFlow {build['tensorflow']}, C++ ABI {build['cxx11_abi']}, "
          f"absl {build['absl_namespace']}" for build in sysconfig._builds()),
      "built with": _native.compiler,
      "runs on": (f"TensorFlow {tf.__version__}, "
                  f"Python {platform.python_version()}, "
                  f"NumPy {np.__version__}"),
      "CPU kernels": (f"{_native.cpu_isa()}, chosen from "
                      f"{', '.join(_native.cpu_isas())}"),
      "GPU kernels": ", ".join(_native.gpu_images()),
      **_gpus(),
  }
  print(f"wrapopt {_native.version}")
  for name, fact in facts.items():
    print(f"  {name:<11}  {fact}")
  devices_of_ops = devices_of_kernels()
  width = max(map(len, devices_of_ops))
  print(f"\n{'op':<{width}}  devices that have kernels")
  for op, devices in sorted(devices_of_ops.items()):
    print(f"{op:<{width}}  {', '.join(devices) or 'none'}")


if __name__ == "__main__":
  main()
