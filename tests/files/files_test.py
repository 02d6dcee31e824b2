"""Files that earlier versions wrote, and the numbers in them.

A new minor version adds its own: see written.py. No file here is ever changed.
"""

import json
import pathlib
import shutil

import pytest

import written

FOLDER = pathlib.Path(__file__).parent
VERSIONS = sorted(path.parent.name for path in FOLDER.glob("*/numbers.json"))


def expected(version):
  return json.loads((FOLDER / version / "numbers.json").read_text())


WAYS = [(version, name, way) for version in VERSIONS
        for name in expected(version)
        for way in dir(written.KINDS[name]) if way.startswith("read")]


@pytest.mark.by_day(19)
@pytest.mark.parametrize("version, name, way", WAYS, ids=lambda x: str(x))
def test_a_file(version, name, way, tmp_path):
  folder = tmp_path / "files"  # A reader may write beside it.
  shutil.copytree(FOLDER / version / name.replace(" ", "_"), folder)
  got = getattr(written.KINDS[name], way)(folder)
  for step, (numbers, want) in enumerate(
      zip(json.loads(json.dumps(got)), expected(version)[name], strict=True)):
    missing = want.keys() - numbers.keys()
    assert not missing
    for variable, value in want.items():
      assert numbers[variable] == value, (step, variable)


def test_each_kind_has_files():
  assert VERSIONS
  assert set(expected(VERSIONS[-1])) == set(written.KINDS)
