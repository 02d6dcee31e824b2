"""Calls the raw ops with random and hostile inputs, as their OpDefs tell.

    ./tools/fuzz ops --minutes 60       # Cases of random numbers.
    ./tools/fuzz ops --seed 1234        # That case alone.
    ./tools/fuzz ops --seed 0 --count 9 # Cases 0 to 8, in one process.

An op that is registered is called: there is no list of ops. A call that fails
must change no variable, and one that succeeds must do what the model of its
family says (fuzz_ops_models). Cases run in a child process, so that a crash or
a call that never ends is a finding too.
"""

import argparse
import collections
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback

# Long ones: others may use the machine.
SECONDS_TO_START, SECONDS_OF_A_CASE = 300, 120
CASES_OF_A_CHILD = 1500  # TensorFlow keeps what it has compiled.


# The child.


def describe(case):
  """A case in words and numbers."""
  import numpy as np  # pylint: disable=g-import-not-at-top
  import tensorflow as tf  # pylint: disable=g-import-not-at-top

  def short(x):
    if not isinstance(x, np.ndarray):
      return repr(x)
    with np.printoptions(threshold=12, precision=17):
      return f"{x.dtype}{list(x.shape)} {x.tolist() if x.size < 9 else x}"

  lines = [f"{case.op}, mode {case.mode}"
           f"{', shapes unknown when built' if case.hidden else ''}"
           f"{', called twice' if case.calls == 2 else ''}"]
  for i, v in enumerate(case.variables):
    marks = [m for m in ("static", "anonymous", "held", "copy_on_read")
             if getattr(v, m)]
    what = v.kind if v.kind != "variable" or v.value is not None else (
        "uninitialized")
    lines.append(f"  variable {i}: {tf.as_dtype(v.dtype).name}"
                 f"{list(v.shape)} {what} on CPU:{v.device} {' '.join(marks)} "
                 f"{short(v.value) if v.value is not None else ''}")
  for name, given in case.inputs.items():
    lines.append(f"  {name}: " + ", ".join(map(short, given)))
  lines += [f"  {name} = {value!r:.80}" for name, value in case.attrs.items()]
  if case.rounds:
    lines.append(f"  {case.rounds!r:.400}")
  lines += [f"  spoiled: {what}" for what in case.spoiled]
  return "\n".join(lines)


def _compiles(op):
  """Whether XLA has a kernel for an op."""
  # pylint: disable-next=g-import-not-at-top
  from tensorflow.python.framework import kernels
  return any(k.device_type == "XLA_CPU_JIT" for k in
             kernels.get_registered_kernels_for_op(op).kernel)


def run_case(case, hook=None):
  """Runs a case.

  Args:
    case: A Case.
    hook: For tests of the fuzzer: a function of the world, before its calls.

  Returns:
    A dict: how many calls were "done" and how many "refused", how many elements
    were "compared" and how many were "left_out", what is "wrong" or None, and
    the last "error" or None.
  """
  import fuzz_ops_runs as runs  # pylint: disable=g-import-not-at-top
  told = {"done": 0, "refused": 0, "compared": 0, "left_out": 0, "wrong": None,
          "error": None}
  world = None
  try:
    world = runs.world_of(case)
    if hook is not None:
      hook(world)
    _run_calls(case, world, told)
  except AssertionError as e:
    told["wrong"] = str(e)
  except Exception:  # pylint: disable=broad-exception-caught
    told["wrong"] = traceback.format_exc()[-3000:]
  finally:
    if world is not None:
      world.close()
  return told


def _run_calls(case, world, told):
  """Makes a case's calls in a world. Raises AssertionError if one is wrong."""
  import fuzz_ops_inputs as inputs  # pylint: disable=g-import-not-at-top
  import fuzz_ops_models as models  # pylint: disable=g-import-not-at-top
  import fuzz_ops_runs as runs  # pylint: disable=g-import-not-at-top
  calls = 1 if inputs.family(case.op) in models.ONE_CALL else case.calls
  refused = runs.ANY_ERROR if inputs.family(case.op) == "AveragingRaise" else (
      runs.REFUSED)
  earlier = []
  for at in range(calls):
    before, probe = world.snapshot(), world.probe()
    try:
      outputs = world.call()
    except refused as e:
      error = told["error"] = f"{type(e).__name__}: {e}"
      told["refused"] += 1
      for i, (was, now) in enumerate(zip(before, world.snapshot())):
        runs.check_bits(now, was, f"call {at + 1} was refused ({error}), but "
                        f"changed variable {i}")
      if not case.spoiled and not models.may_refuse(case, before) and not (
          case.mode == "jit" and not _compiles(case.op)):
        raise AssertionError(f"the op refused a proper call: {error}") from e
      if not models.tells(case, error):
        raise AssertionError(f"a refusal does not tell why: {error}") from e
    else:
      told["done"] += 1
      compared, left_out = models.check(case, before, world.snapshot(),
                                        outputs, probe, earlier)
      earlier.append(outputs)
      told["compared"] += compared
      told["left_out"] += left_out
    world.check_held()


def _serve(args):
  """Runs the cases whose seeds come in, and writes what became of them."""
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  import tensorflow as tf  # pylint: disable=g-import-not-at-top
  import fuzz_ops_inputs as inputs  # pylint: disable=g-import-not-at-top
  tf.config.set_logical_device_configuration(
      tf.config.list_physical_devices("CPU")[0],
      [tf.config.LogicalDeviceConfiguration()] * 2)
  # XLA registers its kernels when it is first used.
  tf.function(lambda: tf.constant(1.) + 1., jit_compile=True)()
  hook = None
  if args.hook:
    module, name = args.hook.split(":")
    hook = getattr(importlib.import_module(module), name)
  print(json.dumps("ready"), file=answers, flush=True)
  for line in sys.stdin:
    seed = int(line)
    case = inputs.make(seed, args.op, args.mode)
    start = time.monotonic()
    told = run_case(case, hook)
    told.update(op=case.op, mode=case.mode, seconds=time.monotonic() - start)
    if told["wrong"] or args.verbose:
      told["case"] = describe(case)
    print(json.dumps(told), file=answers, flush=True)


# The parent.


class Child:
  """A process that runs cases."""

  def __init__(self, args):
    self.log = tempfile.TemporaryFile("w+")
    command = [sys.executable, os.path.abspath(__file__), "--serve"]
    for name in ("op", "mode", "hook"):
      if getattr(args, name):
        command += [f"--{name}", getattr(args, name)]
    # Without Keras, which TensorFlow imports otherwise, and messages.
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3",
           "TF_USE_LEGACY_KERAS": "1",
           "PYTHONFAULTHANDLER": "1", "PYTHONSAFEPATH": "1",
           "PYTHONPATH": os.pathsep.join(
               [os.path.dirname(os.path.abspath(__file__)),
                *filter(None, sys.path)])}
    self.popen = subprocess.Popen(
        command + ["--verbose"] * args.verbose, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=self.log, env=env)
    self.buffer = b""
    self.selector = selectors.DefaultSelector()
    self.selector.register(self.popen.stdout, selectors.EVENT_READ)
    self.first, self.count = None, 0
    answer = self._answer(SECONDS_TO_START)
    if answer != "ready":
      self.end()
      raise RuntimeError(f"the child did not start: {answer}\n{self.said()}")

  def _answer(self, seconds):
    """The child's next answer; a string that tells how it ended instead."""
    until = time.monotonic() + seconds
    while b"\n" not in self.buffer:
      if not self.selector.select(max(0, until - time.monotonic())):
        # The stacks of all threads, from faulthandler.
        self.popen.send_signal(signal.SIGABRT)
        self.popen.wait()
        return f"hang: no end after {seconds:.0f} seconds"
      more = os.read(self.popen.stdout.fileno(), 1 << 16)
      if not more:
        status = self.popen.wait()
        return (f"crash: {signal.Signals(-status).name}" if status < 0
                else f"crash: exit status {status}")
      self.buffer += more
    line, _, self.buffer = self.buffer.partition(b"\n")
    return json.loads(line)

  def run(self, seed, seconds):
    """Runs a case: a dict, or a string that tells how the child ended."""
    self.first = seed if self.first is None else self.first
    self.count += 1
    try:
      self.popen.stdin.write(f"{seed}\n".encode())
      self.popen.stdin.flush()
    except BrokenPipeError:
      pass
    return self._answer(seconds)

  def said(self):
    self.log.seek(0)
    return self.log.read()[-6000:]

  def end(self):
    if self.popen.poll() is None:
      self.popen.kill()
      self.popen.wait()
    for file in (self.popen.stdin, self.popen.stdout, self.log):
      try:
        file.close()
      except BrokenPipeError:
        pass
    self.selector.close()


class Findings:
  """What went wrong, and how often each op did what."""

  def __init__(self):
    self.texts = []
    self.ops = collections.defaultdict(collections.Counter)
    self.modes = collections.defaultdict(collections.Counter)
    self.cases, self.slow = 0, []

  def total(self, what):
    return sum(of[what] for of in self.ops.values())

  def count(self, answer):
    self.cases += 1
    of = self.ops[answer["op"]]
    of["cases"] += 1
    for what in ("done", "refused", "compared", "left_out"):
      of[what] += answer[what]
    self.modes[answer["mode"]].update(cases=1, done=answer["done"])

  def share(self):
    """The part of all calls that succeeded."""
    return self.total("done") / max(self.total("done") + self.total("refused"),
                                    1)

  def table(self):
    """Lines: how many calls of each op succeeded."""
    lines = [f"{'op':42} cases calls  done  share"]
    for op, of in sorted(self.ops.items()):
      calls = of["done"] + of["refused"]
      lines.append(f"{op:42} {of['cases']:5} {calls:5} {of['done']:5} "
                   f"{of['done'] / max(calls, 1):6.0%}")
    lines.append(f"of all calls {self.share():.0%} succeeded")
    lines += [f"mode {mode}: {of['cases']} cases, {of['done']} calls succeeded"
              for mode, of in sorted(self.modes.items())]
    lines.append(f"elements compared with models: {self.total('compared')}; "
                 f"left out, as odd numbers: {self.total('left_out')}")
    return lines


def _command(args, seed, count):
  parts = ["./tools/fuzz ops", f"--seed {seed}"]
  parts += [f"--count {count}"] if count > 1 else []
  parts += [f"--{name} {getattr(args, name)}" for name in ("op", "mode")
            if getattr(args, name)]
  return " ".join(parts)


def _report(args, child, seed, answer):
  """The text of a finding, after a try to repeat it alone."""
  if isinstance(answer, dict):
    what, said = answer["wrong"] + "\n" + answer["case"], ""
  else:
    what, said = answer, child.said()
  first, count = child.first, child.count
  if count > 1:
    alone = Child(args)
    again = alone.run(seed, args.deadline)
    if isinstance(again, dict) and not again["wrong"]:
      command = _command(args, first, count) + (
          f"\n  (case {seed} alone shows nothing)")
    else:
      command = _command(args, seed, 1)
    alone.end()
  else:
    command = _command(args, seed, 1)
  if not isinstance(answer, dict):
    import fuzz_ops_inputs as inputs  # pylint: disable=g-import-not-at-top
    what += "\n" + describe(inputs.make(seed, args.op, args.mode)) + (
        f"\nThe child said:\n{said}")
  return f"FOUND in case {seed}: {what}\nTo repeat: {command}"


def fuzz(args, seeds, out=print):
  """Runs the cases of `seeds` until the time is up.

  Args:
    args: As from `parse`.
    seeds: Numbers.
    out: A function that prints a line.

  Returns:
    Findings.
  """
  findings = Findings()
  until = None if args.minutes is None else time.monotonic() + 60 * args.minutes
  child = None
  start = time.monotonic()
  try:
    for seed in seeds:
      if until is not None and time.monotonic() > until:
        break
      if child is None:
        child = Child(args)
      answer = child.run(seed, args.deadline)
      if isinstance(answer, dict):
        findings.count(answer)
        if answer["seconds"] > 5:
          findings.slow.append((answer["seconds"], seed, answer["op"]))
        if args.verbose:
          out(f"{answer['case']}\n  done {answer['done']}, refused "
              f"{answer['refused']}: {answer['error']}")
      if not isinstance(answer, dict) or answer["wrong"]:
        findings.texts.append(_report(args, child, seed, answer))
        out(findings.texts[-1])
        if len(findings.texts) >= args.most:
          out(f"Stopped after {args.most} findings.")
          break
      if not isinstance(answer, dict) or child.count >= CASES_OF_A_CHILD:
        child.end()
        child = None
  finally:
    if child is not None:
      child.end()
  seconds = time.monotonic() - start
  out(f"{findings.cases} cases in {seconds:.0f} seconds, "
      f"{60 * findings.cases / max(seconds, 1e-9):.0f} per minute, "
      f"{len(findings.texts)} findings")
  return findings


def without_model():
  """Names of the ops that no model checks."""
  import fuzz_ops_inputs as inputs  # pylint: disable=g-import-not-at-top
  import fuzz_ops_models as models  # pylint: disable=g-import-not-at-top
  return [op for op in inputs.op_defs_once() if models.model_of(op) is None]


def parse(argv):
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--minutes", type=float, help="how long to search")
  parser.add_argument("--seed", type=int, help="the first case; without "
                      "--minutes and --count, the only one")
  parser.add_argument("--count", type=int, help="how many cases to run")
  parser.add_argument("--op", help="a part of the names of the ops to call")
  parser.add_argument("--mode", help="one of eager, function, graph, ref-graph "
                      "and jit, for the ops that have it")
  parser.add_argument("--most", type=int, default=20,
                      help="findings after which to stop")
  parser.add_argument("--deadline", type=float, default=SECONDS_OF_A_CASE,
                      help="seconds that a case may take")
  parser.add_argument("--verbose", action="store_true", help="print every case")
  parser.add_argument("--hook", help=argparse.SUPPRESS)  # For its own tests.
  parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
  return parser.parse_args(argv)


def main(argv):
  args = parse(argv)
  if args.serve:
    _serve(args)
    return 0
  if missing := without_model():
    print("Without a model, so a result may be any:", ", ".join(missing))
  alone = args.seed is not None and args.minutes is None
  count = args.count or (1 if alone else None)
  if args.minutes is None and count is None:
    args.minutes = 1
  first = args.seed
  if first is None:
    first = int.from_bytes(os.urandom(4), "little")
  print(f"Cases from {first} on")
  seeds = range(first, first + count) if count else iter(
      range(first, sys.maxsize))
  findings = fuzz(args, seeds)
  print("\n".join(findings.table()))
  for seconds, seed, op in findings.slow:
    print(f"slow: case {seed} of {op} took {seconds:.1f} seconds")
  return 1 if findings.texts else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
