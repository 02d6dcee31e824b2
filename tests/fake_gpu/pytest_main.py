"""Runs pytest on a machine with a GPU, real or emulated.

On a machine with a GPU, tests run on it. On others, the libraries in this
folder emulate one, and the interpreter of .venv-tensorflow, a folder next to
.venv, has TensorFlow's CUDA wheel.
"""

import os
import pathlib
import subprocess
import sys


def has_gpu():
  try:
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True,
                            text=True, check=False)
  except OSError:
    return False
  return listed.stdout.startswith("GPU")


def main():
  python = pathlib.Path(sys.executable)
  environment = dict(os.environ)
  if not has_gpu():
    python = pathlib.Path(sys.prefix).parent / ".venv-tensorflow/bin/python"
    if not python.exists():
      sys.exit(f"there is no {python}, an interpreter with TensorFlow's CUDA "
               "wheel: ./tools/test makes it")
    environment["LD_LIBRARY_PATH"] = str(
        pathlib.Path(__file__).parent.absolute())
    environment["WRAPOPT_FAKE_GPU_LOG"] = os.path.join(
        os.environ["TEST_TMPDIR"], "fake_gpu.log")
  os.execve(python, [str(python), "tools/pytest_main.py", *sys.argv[1:]],
            environment)


if __name__ == "__main__":
  main()
