"""Writes programs of `programs.py` as Python code, with what they must give.

The code is what runs, and what is printed if it fails.
"""

import functools
import inspect
import sys
import tempfile

import tensorflow as tf

import processes
import programs_keras
import programs_v1


def code_of(program):
  """The code of a program, without the prelude."""
  return _WRITERS[program.api, program.mode](program).write()


@functools.cache
def _prelude():
  import programs_prelude  # pylint: disable=g-import-not-at-top
  return programs_prelude


def run(code, alone=False):
  """Runs the code of a program, perhaps in a process of its own."""
  if alone:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
      file.write(printed(code))
      file.flush()
      done = processes.run_python(file.name, pythonpath=sys.path)
    assert done.returncode == 0, done.stderr
    return
  namespace = {**vars(_prelude())}
  try:
    exec(compile(code, "<program>", "exec"), namespace)
  finally:
    tf.debugging.disable_check_numerics()
    tf.config.optimizer.set_jit(False)


def printed(code):
  """The code as a file that runs by itself."""
  return inspect.getsource(_prelude()) + "\n\n" + code


_WRITERS = {
    ("keras", "eager"): programs_keras.Keras,
    ("keras", "function"): programs_keras.Keras,
    ("keras", "jit"): programs_keras.Keras,
    ("keras", "fit"): programs_keras.Fit,
    ("v1", "eager"): programs_v1.V1,
    ("v1", "function"): programs_v1.V1,
    ("v1", "jit"): programs_v1.V1,
    ("v1", "resource"): programs_v1.Session,
    ("v1", "ref"): programs_v1.Session,
}
