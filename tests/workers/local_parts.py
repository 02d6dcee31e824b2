"""The rule of DiLoCo in NumPy, and servers in processes of their own."""

import os
import signal
import subprocess
import sys

import numpy as np

RATE, MOMENTUM = 0.7, 0.9


class Oracle:
  """The rule in NumPy float64."""

  def __init__(self, center, rate=RATE, momentum=MOMENTUM):
    self.center = np.float64(center)
    self.velocity = np.zeros_like(self.center)
    self.rate, self.momentum = rate, momentum

  def end_round(self, values, weights):
    mean = np.average(np.float64(values), axis=0, weights=weights)
    way = self.center - mean
    self.velocity = self.momentum * self.velocity + way
    self.center = self.center - self.rate * (
        way + self.momentum * self.velocity)
    return self.center


class Process:
  """A server in a process of its own, on a port of its own."""

  def __init__(self, port=0):
    self.popen = subprocess.Popen(
        [sys.executable, "-m", "wrapopt.server", "--port", str(port)],
        stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1", "TF_CPP_MIN_LOG_LEVEL": "2"})
    line = self.popen.stdout.readline()
    assert line.startswith("wrapopt server listens at port "), line
    self.port = int(line.split()[-1])
    self.address = f"localhost:{self.port}"

  def end(self, number=signal.SIGKILL):
    self.popen.send_signal(number)
    return self.popen.wait(30)
