"""The machine code of the GPU kernels in the images."""

import collections
import functools
import lzma
import pathlib
import re
import struct

import pytest

from numerics import WITH_GPU_KERNELS
from wrapopt import _native

DTYPES = "float", "double"
STEPS = [*WITH_GPU_KERNELS, "Average"]

# As in cc/gpu/images.inc: {is PTX, compute capability, kind, offset, compressed
# bytes, bytes}.
ROW = re.compile(r"\{(true|false), (\d+), Kind::k(\w+), "
                 r"wrapopt_gpu_images \+ (\d+), (\d+), (\d+)\},")


@functools.cache
def images():
  """{(is PTX, compute capability, kind): the image}"""
  folder = pathlib.Path("cc/gpu")
  data = (folder / "images.bin").read_bytes()
  found = {}
  for is_ptx, cc, kind, begin, size, expanded in ROW.findall(
      (folder / "images.inc").read_text(encoding="utf-8")):
    image = lzma.decompress(data[int(begin):int(begin) + int(size)])
    assert len(image) == int(expanded)
    found[is_ptx == "true", int(cc), kind.lower()] = image
  return found


def ptx():
  """{kernel: its text}"""
  text = "".join(image.decode() for (is_ptx, _, _), image in images().items()
                 if is_ptx)
  entries = re.split(r"\.visible \.entry (\w+)\(", text)[1:]
  return dict(zip(entries[::2], entries[1::2]))


def kernels_of(kind):
  names = [f"{step}_{dtype}" for dtype in DTYPES for step in STEPS]
  if kind != "program":  # Programs of XLA take dense steps only.
    names += ["CatchUp_float", "CatchUp_double", "Sum_float", "Sum_double",
              "Mark_double"]
  return {f"wrapopt_{kind}_{name}" for name in names}


def test_every_image_has_its_kernels():
  assert len(images()) == 18
  for (_, _, kind), image in images().items():
    found = re.findall(rb"wrapopt_[a-z]+_\w+_(?:float|double)\b", image)
    assert {name.decode() for name in found} == kernels_of(kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind, rule", [
    *((kind, step) for kind in ("large", "program") for step in STEPS),
    ("large", "CatchUp")])
def test_memory_is_read_and_written_by_16_bytes(kind, rule, dtype):
  text = ptx()[f"wrapopt_{kind}_{rule}_{dtype}"]
  # A share of an array is two times 16 bytes; a source, and an average, is read
  # in a loop.
  states, inputs = ((), ("source",)) if rule in ("Average", "CatchUp") else (
      _native.rules()[rule].states, _native.rules()[rule].inputs)
  loads = len(re.findall(r"ld\.global\.v4\.\w32|ld\.global\.v2\.\w64", text))
  stores = len(re.findall(r"st\.global\.v4\.\w32|st\.global\.v2\.\w64", text))
  assert loads >= 2 * (len(states) + len(inputs) + 1)
  assert stores >= 2 * (len(states) + 1)


def test_operations_are_rounded_one_by_one():
  for kernel, text in ptx().items():
    # A product and a sum in one, approximations.
    for word in "fma.", "mad.rn.f", "approx", "div.full":
      assert word not in text, (kernel, word)
  assert "div.rn.ftz.f32" in ptx()["wrapopt_large_Adam_float"]


def test_subnormal_numbers_of_float_are_flushed():
  arithmetic = re.compile(
      r"\b((?:add|sub|mul|div|sqrt|setp|max|min|neg|abs)\.[\w.]*f32)\b")
  for kernel, text in ptx().items():
    found = arithmetic.findall(text)
    assert bool(found) == kernel.endswith("_float"), kernel
    assert all(".ftz." in operation for operation in found), (kernel, found)


def resources(image):
  """{attribute of cubins: its values, of all kernels}"""
  sections, size, count, names = struct.unpack_from("<Q10xHHH", image, 0x28)
  headers = [struct.unpack_from("<I20xQQ", image, sections + i * size)
             for i in range(count)]
  found = collections.defaultdict(list)
  for name, offset, length in headers:
    begin = headers[names][1] + name
    if image[begin:image.index(b"\0", begin)] != b".nv.info":
      continue
    # Records of a format, an attribute, and a payload, whose length is told
    # where the format is 4.
    at = offset
    while at < offset + length:
      form, attribute, told = struct.unpack_from("<BBH", image, at)
      at += 4
      if form == 4:
        if told == 8:  # A kernel's symbol, and the value.
          found[attribute].append(struct.unpack_from("<II", image, at)[1])
        at += told
  return found


def test_numbers_stay_in_registers():
  frame_size, registers = 0x11, 0x2f
  for kernel, text in ptx().items():
    assert ".local" not in text, kernel
  for name, image in images().items():
    if name[0]:
      continue
    of = resources(image)
    for attribute in frame_size, registers:
      assert len(of[attribute]) >= len(kernels_of(name[2])), name
    # A table that was copied would take 4096 bytes of a thread's memory; a few
    # numbers the compiler itself keeps there, for one more block.
    assert max(of[frame_size]) <= 24, name
    # So that two blocks share a multiprocessor.
    assert max(of[registers]) <= 128, name
