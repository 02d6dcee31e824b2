"""Merges wheels, each for one version of TensorFlow, into one for all.

Usage: merge_wheels.py OUT_FOLDER WHEEL...

They share all files but the libraries of each TensorFlow, and these must be
equal to the last byte: as they were built apart, a build is reproducible.
"""

import pathlib
import sys
import zipfile

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import build_wheel

_REQUIRES = "Requires-Dist: "


def _merged(lines):
  """The line of METADATA that says what several say for their TensorFlow."""
  if len(set(lines)) == 1:
    return lines[0]
  found = [Requirement(line.removeprefix(_REQUIRES)) for line in lines
           if line.startswith(_REQUIRES)]
  if len(found) < len(lines) or len({(r.name, str(r.marker))
                                     for r in found}) != 1:
    raise SystemExit(f"METADATA differs: {sorted(set(lines))}")
  bounds = {}
  for requirement in found:
    for one in requirement.specifier:
      bounds.setdefault(one.operator, []).append(Version(one.version))
  if bounds.keys() != {">=", "<"}:
    raise SystemExit(f"a range must be >=,<, got {lines}")
  found[0].specifier = SpecifierSet(
      f">={min(bounds['>='])},<{max(bounds['<'])}")
  return f"{_REQUIRES}{found[0]}"


def merge_metadata(texts):
  """One METADATA of several, whose extras ask for their TensorFlow."""
  return "\n".join(map(_merged, zip(*(text.split("\n") for text in texts),
                                    strict=True)))


def merge(wheels):
  """{name: bytes} of the files in all wheels, without RECORD."""
  files, metadata = {}, []
  for path in wheels:
    with zipfile.ZipFile(path) as wheel:
      for name in wheel.namelist():
        data = wheel.read(name)
        if name.endswith("/METADATA"):
          metadata.append(data.decode())
          data = b""
        if name.endswith("/RECORD"):
          continue
        if files.setdefault(name, data) != data:
          raise SystemExit(f"{name} of {path} differs from that of {wheels[0]}:"
                           " a build is not reproducible")
  (name,) = (name for name in files if name.endswith("/METADATA"))
  files[name] = merge_metadata(metadata).encode()
  return files


def main():
  folder, *wheels = map(pathlib.Path, sys.argv[1:])
  names = {wheel.name for wheel in wheels}
  if len(names) != 1:
    raise SystemExit(f"all wheels must have one name, got {sorted(names)}")
  folder.mkdir(parents=True, exist_ok=True)
  out = folder / names.pop()
  files = sorted(merge(wheels).items(),
                 key=lambda item: (".dist-info/" in item[0], item[0]))
  (info,) = {name.split("/")[0] for name, _ in files if ".dist-info/" in name}
  build_wheel.write(out, files, info)
  print(out)


if __name__ == "__main__":
  main()
