"""Some seconds of the fuzzer of files, and that it sees what is broken."""

import contextlib
import os

import pytest

import fuzz_files
from wrapopt.checkpoints import _files
from wrapopt.checkpoints import _h5
from wrapopt.checkpoints import _keras
from wrapopt.checkpoints import _merge
from wrapopt.checkpoints import _sink
from wrapopt.checkpoints import _source


@pytest.fixture(scope="module")
def corpus():
  return fuzz_files.Corpus()


@pytest.mark.by_day(0)
def test_no_findings(corpus):
  result = fuzz_files.fuzz(0, cases=150, corpus=corpus)
  assert not result.findings
  # Each kind runs, and both an error and a result are common.
  assert {name.split()[0] for name in result.outcomes} >= {
      "damage", "change", "race", "full", "kill"}
  for outcome in "damage error", "damage right", "change error", "full error":
    assert result.outcomes[outcome] >= 5


# What is broken on purpose, one thing a test.


def _in_place(from_, to):
  with open(from_, "rb") as f:
    # In parts: some kill soon comes between two of them.
    while part := f.read(200):
      with open(to, "ab") as g:
        g.write(part)
  os.unlink(from_)


def _hangs(*args):
  del args
  while True:
    pass


class _Plain(str):
  """A path, which HDF5 opens itself."""
  error = None

  def close(self):
    pass


BROKEN = [
    ("no checksum in archives", "wrong: ", "damage", "keras",
     _keras.KerasSource, "verify", lambda self: None),
    ("files may change", "wrong: ", "change", "h5", _source.Source,
     "check_unchanged", lambda self: None),
    ("errors without names", "names none of", "damage", "h5", _files,
     "naming", lambda path, what: contextlib.nullcontext()),
    ("an output in place", "wrong: an output that cannot be read", "kill", "h5",
     _sink.os, "replace", _in_place),
    ("partial files stay", "other files", "damage", "tensorflow",
     _sink.Sink, "discard", lambda self: None),
    ("partial files of the killed stay", "other files", "kill", "h5", _sink,
     "remove_partial", lambda directory, prefix: None),
    ("wrong numbers", "wrong: numbers", "damage", "tensorflow", _merge,
     "checked_weights", lambda weights, count: ([0.3] * count, 1.0)),
    ("another error", "raises Traceback", "damage", "tensorflow", _merge,
     "check", lambda inputs, only: {}["no name"]),
    ("a crash", "crashes: signal 6", "damage", "keras", _merge, "check",
     lambda inputs, only: os.abort()),
    ("a hang", "hangs", "damage", "h5", _merge, "check", _hangs),
]


# From these cases on, the rare findings come soon.
FIRST = {"no checksum in archives": 2440, "files may change": 1140,
         "an output in place": 2450}


@pytest.mark.by_day(4)
@pytest.mark.parametrize(
    "first, finding, kind, format, where, name, broken",
    [(FIRST.get(b[0], 0), *b[1:]) for b in BROKEN],
    ids=[b[0].replace(" ", "_") for b in BROKEN])
def test_a_finding(corpus, monkeypatch, capfd, first, finding, kind, format,  # pylint: disable=redefined-builtin
                   where, name, broken):
  monkeypatch.setattr(where, name, broken)
  if finding == "hangs":
    monkeypatch.setattr(fuzz_files, "HANG", 0.5)
  result = fuzz_files.fuzz(
      0, cases=400, most=1, first=first, corpus=corpus, workers=1,
      only=lambda case: (case.kind, case.format) == (kind, format))
  (number, of, found), = result.findings
  assert found.startswith(finding)
  assert of.startswith(f"{kind} {format} ")
  # The same case again.
  assert f"--seed 0 --case {number}: {of}: {finding}" in capfd.readouterr().err
  if kind == "damage":
    again = fuzz_files.fuzz(0, cases=1, first=number, corpus=corpus)
    assert again.findings[0][2].startswith(finding)


def test_a_crash_of_hdf5_on_a_full_disk(corpus, monkeypatch):
  monkeypatch.setattr(_h5, "_Drain", _Plain)
  result = fuzz_files.fuzz(0, cases=8, most=8, first=250, corpus=corpus,
                           workers=1,
                           only=lambda case: (case.kind, case.format) == (
                               "full", "h5"))
  assert any(found == "crashes: signal 11" for _, _, found in result.findings)
