"""What is in the images: the GPU kernels as they were compiled."""

import pathlib
import re

import pytest

from wrapopt import _native

KERNELS = [*_native.rules(), "Average", "Sum"]

# As in cc/gpu/images.inc: {is PTX, compute capability, has large tables,
# offset, bytes}.
ROW = re.compile(r"\{(true|false), (\d+), (true|false), (\d+), (\d+)\},")


def images():
  folder = pathlib.Path("cc/gpu")
  data = (folder / "images.bin").read_bytes()
  rows = ROW.findall((folder / "images.inc").read_text(encoding="utf-8"))
  return {(is_ptx == "true", int(cc), is_large == "true"):
              data[int(begin):int(begin) + int(size)]
          for is_ptx, cc, is_large, begin, size in rows}


def ptx():
  """{kernel: its text}"""
  (text,) = (image.decode() for (is_ptx, _, _), image in images().items()
             if is_ptx)
  entries = re.split(r"\.visible \.entry (\w+)\(", text)[1:]
  return dict(zip(entries[::2], entries[1::2]))


def test_every_image_has_every_kernel():
  assert len(images()) == 12
  for (_, _, is_large), image in images().items():
    for kernel in KERNELS:
      for dtype in "float", "double":
        size = "large" if is_large else "small"
        assert f"wrapopt_{size}_{kernel}_{dtype}".encode() in image


@pytest.mark.parametrize("dtype", ["float", "double"])
@pytest.mark.parametrize("rule", [*_native.rules(), "Average"])
def test_memory_is_read_and_written_by_16_bytes(rule, dtype):
  text = ptx()[f"wrapopt_large_{rule}_{dtype}"]
  # A share of an array is two times 16 bytes; a source, and an average, is read
  # in a loop.
  states, inputs, _ = _native.rules().get(rule, ([], ["source"], []))
  loads = len(re.findall(r"ld\.global\.v4\.\w32|ld\.global\.v2\.\w64", text))
  stores = len(re.findall(r"st\.global\.v4\.\w32|st\.global\.v2\.\w64", text))
  assert loads >= 2 * (len(states) + len(inputs) + 1)
  assert stores >= 2 * (len(states) + 1)


def test_operations_are_rounded_one_by_one():
  for kernel, text in ptx().items():
    # A product and a sum in one, subnormal numbers as zero, approximations.
    for word in "fma.", "mad.rn.f", ".ftz", "approx", "div.full":
      assert word not in text, (kernel, word)
  assert "div.rn.f32" in ptx()["wrapopt_large_Adam_float"]


def test_numbers_stay_in_registers():
  for kernel, text in ptx().items():
    assert ".local" not in text, kernel
  for name, image in images().items():
    # The section of a kernel that keeps some elsewhere.
    assert b".nv.local." not in image, name
