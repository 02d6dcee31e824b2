"""The library in a program that does not import wrapopt."""

import os
import re

import pytest

import wrapopt
from processes import printed_by, run_python
from wrapopt import sysconfig


def test_get_lib_is_the_file_beside_the_package():
  library = wrapopt.sysconfig.get_lib()
  assert os.path.dirname(library) == os.path.dirname(wrapopt.__file__)
  with open(library, "rb") as f:
    assert f.read(4) == b"\x7fELF"


def test_get_lib_imports_nothing():
  process = run_python("-v", sysconfig.__file__)
  assert process.stdout == f"{sysconfig.get_lib()}\n"
  imported = re.findall("^import '([^']+)'", process.stderr, re.MULTILINE)
  assert "importlib.metadata" in imported
  assert not [m for m in imported if m.startswith(("tensorflow", "wrapopt"))]


CUSTOM_GRAPH = """
import sys

import tensorflow as tf

raw = tf.load_op_library(sys.argv[1])

with tf.Graph().as_default():
  value = tf.compat.v1.get_variable(
      "value", initializer=[8.0, 4.0], use_resource=True)
  shadow = tf.compat.v1.get_variable(
      "shadow", initializer=[0.0, 0.0], use_resource=True)
  update = raw.wrapopt_ema_update(
      [shadow.handle, value.handle], [0.75], N=1, NK=1, T=tf.float32,
      S=tf.float32)
  with tf.compat.v1.Session() as session:
    session.run(tf.compat.v1.global_variables_initializer())
    session.run(update)
    print(session.run(shadow).tolist())
assert not [m for m in sys.modules if m.startswith("wrapopt")]
"""


def test_ops_work_in_a_process_that_imports_only_tensorflow():
  printed = printed_by("-c", CUSTOM_GRAPH, wrapopt.sysconfig.get_lib(),
                       TF_USE_LEGACY_KERAS="1")
  assert printed == "[2.0, 1.0]\n"  # A quarter of the way.


@pytest.mark.parametrize("text, namespace", [
    ("#define ABSL_OPTION_USE_INLINE_NAMESPACE 1\n"
     "#define ABSL_OPTION_INLINE_NAMESPACE_NAME lts_20250814\n",
     "lts_20250814"),
    ("#define ABSL_OPTION_USE_INLINE_NAMESPACE 0\n"
     "#define ABSL_OPTION_INLINE_NAMESPACE_NAME head\n", ""),
    ("// #define ABSL_OPTION_INLINE_NAMESPACE_NAME in_a_comment\n", None),
    (None, None),
])
def test_absl_namespace(tmp_path, text, namespace):
  if text is not None:
    (tmp_path / "absl" / "base").mkdir(parents=True)
    (tmp_path / "absl" / "base" / "options.h").write_text(text)
  assert sysconfig._absl_namespace(str(tmp_path)) == namespace
