"""What the tests of the benchmarks share."""

import importlib.util
import json
import shlex

import tensorflow as tf

from wrapopt.bench import __main__ as command
from wrapopt.bench import harness
from wrapopt.bench import sets
from wrapopt.bench import tables


def make_small(monkeypatch, shapes):
  """Makes all turns short, and all sets of variables `shapes`."""
  alternate = harness.alternate
  monkeypatch.setattr(
      harness, "alternate", lambda *args, **kwargs: alternate(
          *args, **{**kwargs, "turn_seconds": 1e-4}))
  monkeypatch.setattr(sets, "VARIABLE_SETS",
                      dict.fromkeys(sets.VARIABLE_SETS, shapes))


def run(command_line, folder):
  """What a command writes to a file in a folder."""
  path = folder / "results.json"
  command.main([*shlex.split(command_line), "--json", str(path)])
  return json.loads(path.read_text())


def check_columns(name, written):
  """Fails unless the tables of the documents find all their figures in a run.

  Args:
    name: The file of results that the run is for.
    written: What it wrote.
  """
  blocks = {block: of_block for block, of_block in tables.BLOCKS.items()
            if of_block.runs.split()[0] == name and block != "costs"}
  for block, of_block in blocks.items():
    titles = [*of_block.rows, *(
        title for title, *_ in of_block.columns
        if (importlib.util.find_spec("torch") or not (
            "PyTorch" in title or "AdamWScheduleFree" in title))
        and (not title.startswith("GPU") or
             tf.config.list_physical_devices("GPU")))]
    header = tables.block(block, lambda _: written).splitlines()[1]
    assert header == "| " + " | ".join(titles) + " |"
