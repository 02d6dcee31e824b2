"""The steps of PyTorch's optimizers: a program that bench/step.py starts.

It runs in a separate process, because PyTorch and TensorFlow both contain LLVM
and cannot be loaded into one process. So it imports neither TensorFlow nor
wrapopt. Each line of input is a JSON list of a function's name and its
arguments. Each line of output is the result of the function in JSON.
"""

import importlib
import json
import sys
import time

import torch


class Steps:
  """Optimizers of one kind: {code: (optimizer, averages)}."""

  def __init__(self, shapes, name, arguments, decay, threads):
    torch.set_num_threads(threads)
    self._shapes, self._decay = shapes, decay
    self._name, self._arguments = name, arguments
    self._placed = {"fused": None, "foreach": None}

  def place(self):
    """Makes new arrays; returns the codes that the optimizer has."""
    for code in list(self._placed):
      try:
        self._placed[code] = self._make(code)
      except (TypeError, RuntimeError):  # The optimizer has no such code.
        del self._placed[code]
    return list(self._placed)

  def seconds(self, code, calls):
    """Seconds per step, in `calls` steps."""
    optimizer, averages = self._placed[code]
    values = optimizer.param_groups[0]["params"]
    start = time.perf_counter()
    for _ in range(calls):
      optimizer.step()
      if self._decay is not None:
        with torch.no_grad():
          torch._foreach_lerp_(averages, values, 1 - self._decay)
    return (time.perf_counter() - start) / calls

  def _make(self, code):
    values = [torch.nn.Parameter(torch.rand(shape)) for shape in self._shapes]
    for v in values:
      v.grad = torch.rand(v.shape)
    module, _, name = self._name.rpartition(".")
    optimizer = getattr(importlib.import_module(module), name)(
        values, **self._arguments, **{code: True})
    if hasattr(optimizer, "train"):  # Of `schedulefree`.
      optimizer.train()
    return optimizer, [v.detach().clone() for v in values]


def main():
  steps = Steps(*json.loads(sys.argv[1]))
  for line in sys.stdin:
    name, *arguments = json.loads(line)
    print(json.dumps(getattr(steps, name)(*arguments)), flush=True)


if __name__ == "__main__":
  main()
