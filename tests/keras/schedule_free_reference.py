"""Prints where `schedulefree` for PyTorch goes, as JSON.

Run by schedule_free_reference_test.py in .venv-torch.
"""

import json
import sys

import numpy as np
import schedulefree
import torch


def sgd(variables):
  return schedulefree.SGDScheduleFree(
      variables, lr=0.25, momentum=0.9, warmup_steps=50, weight_decay=0.03125,
      r=1.5)


def adamw(variables):
  return schedulefree.AdamWScheduleFree(
      variables, lr=0.0625, betas=(0.9, 0.999), eps=1e-12, warmup_steps=50,
      weight_decay=0.03125, r=0.5, weight_lr_power=1.0)


def wrapper(variables):
  return schedulefree.ScheduleFreeWrapper(
      torch.optim.SGD(variables, lr=0.25, weight_decay=0.0625), momentum=0.75,
      weight_decay_at_y=0.125)


def run(make, start, noise, rates):
  """Trains; returns {name: array} of x, y and z."""
  w = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
  opt = make([w])
  opt.train()
  for t, x in enumerate(noise):
    for group in opt.param_groups:
      group["lr"] *= rates.get(str(t), 1.0)
    w.grad = 0.5 * w.detach() + torch.tensor(x, dtype=torch.float64)
    opt.step()
  points = {"y": w.detach().numpy().tolist(),
            "z": opt.state[w]["z"].numpy().tolist()}
  opt.eval()
  return {**points, "x": w.detach().numpy().tolist()}


if __name__ == "__main__":
  task = json.load(sys.stdin)
  json.dump({make.__name__: run(make, np.array(task["start"]), task["noise"],
                                task["rates"])
             for make in (sgd, adamw, wrapper)}, sys.stdout)
