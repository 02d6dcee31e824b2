"""Compiles the GPU kernels with NVRTC, and collects the images.

NVRTC comes from PyPI and is a whole compiler: it takes no CUDA toolkit. It is
not needed where the kernels run.
"""

import argparse
import ctypes
import hashlib
import importlib.metadata
import lzma
import pathlib

_OPTIONS = [
    "--std=c++17",
    # The same numbers as the CPU kernels: each operation is rounded separately,
    # roots and quotients are rounded to nearest, and subnormal numbers of float
    # are flushed. A GPU cannot flush those of double.
    "--fmad=false",
    "--ftz=true",
    "--prec-div=true",
    "--prec-sqrt=true",
    # Functions without an annotation are device functions.
    "--device-as-default-execution-space",
]


class Nvrtc:
  """The NVRTC library of a certain version."""

  def __init__(self, version):
    files = importlib.metadata.files("nvidia-cuda-nvrtc-cu12")
    found = importlib.metadata.version("nvidia-cuda-nvrtc-cu12")
    if found != version:
      raise SystemExit(f"NVRTC must be {version}, got {found}: run "
                       "`bazel sync --configure` after a change of the venv")
    (library,) = [f for f in files if f.name == "libnvrtc.so.12"]
    self._library = ctypes.CDLL(str(library.locate()))
    self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

  def _call(self, function, *arguments):
    result = getattr(self._library, function)(*arguments)
    if result:
      text = self._library.nvrtcGetErrorString(result).decode()
      raise RuntimeError(f"{function}: {text}")

  def _bytes(self, size_function, function, program):
    size = ctypes.c_size_t()
    self._call(size_function, program, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value)
    self._call(function, program, data)
    return data.raw

  def compile(self, source, name, architecture, options):
    """Returns machine code for sm_*, PTX for compute_*."""
    program = ctypes.c_void_p()
    self._call("nvrtcCreateProgram", ctypes.byref(program), source,
               name.encode(), 0, None, None)
    options = [f"--gpu-architecture={architecture}", *_OPTIONS, *options]
    array = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
    try:
      self._call("nvrtcCompileProgram", program, len(options), array)
    except RuntimeError as e:
      log = self._bytes("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program)
      raise SystemExit(f"{e}\n{log.decode()}") from None
    if architecture.startswith("compute_"):
      # Including the NUL by which the driver finds the end.
      return self._bytes("nvrtcGetPTXSize", "nvrtcGetPTX", program)
    return self._bytes("nvrtcGetCUBINSize", "nvrtcGetCUBIN", program)


def _compile(args):
  source = pathlib.Path(args.source)
  options = [f"--include-path={path}" for path in args.include]
  options += [f"--define-macro=WRAPOPT_{args.kind.upper()}"]
  image = Nvrtc(args.nvrtc).compile(
      source.read_bytes(), args.source, args.architecture, options)
  pathlib.Path(args.out).write_bytes(image)


def _collect(args):
  """Writes all images, compressed, to one file, and their table to another."""
  data, rows = b"", []
  for image in args.image:
    name, path = image.split("=", 1)
    architecture, kind = name.split("-")
    code, number = architecture.split("_")
    content = pathlib.Path(path).read_bytes()
    # To expand it takes as much memory as the dictionary has.
    xz = lzma.compress(content, filters=[{
        "id": lzma.FILTER_LZMA2, "preset": 9,
        "dict_size": 2**22}])
    rows.append("{%s, %s, Kind::k%s, wrapopt_gpu_images + %d, %d, %d},\n" % (
        str(code == "compute").lower(), number, kind.capitalize(), len(data),
        len(xz), len(content)))
    data += xz
  pathlib.Path(args.data).write_bytes(data)
  pathlib.Path(args.table).write_text("".join(rows), encoding="utf-8")
  pathlib.Path(args.assembly).write_text(
      # The hash changes with the images, because Bazel does not know the
      # included file as a dependency of the assembler.
      f'# {hashlib.sha256(data).hexdigest()}\n'
      '\t.section .rodata\n'
      '\t.globl wrapopt_gpu_images\n'
      '\t.hidden wrapopt_gpu_images\n'
      'wrapopt_gpu_images:\n'
      f'\t.incbin "{args.data}"\n'
      '\t.section .note.GNU-stack,"",@progbits\n', encoding="utf-8")


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  commands = parser.add_subparsers(required=True)
  command = commands.add_parser("compile")
  command.add_argument("--nvrtc", required=True, help="its version")
  command.add_argument("--architecture", required=True)
  command.add_argument("--kind", required=True,
                       choices=["small", "large", "program"])
  command.add_argument("--include", action="append", default=[])
  command.add_argument("--out", required=True)
  command.add_argument("source")
  command.set_defaults(run=_compile)
  command = commands.add_parser("collect")
  command.add_argument("--image", action="append", default=[],
                       metavar="NAME=PATH")
  command.add_argument("--data", required=True)
  command.add_argument("--table", required=True)
  command.add_argument("--assembly", required=True)
  command.set_defaults(run=_collect)
  args = parser.parse_args()
  args.run(args)


if __name__ == "__main__":
  main()
