"""A TensorFlow cluster of processes on this machine, which end together.

The processes are forked from one that has imported TensorFlow but has not run
it, because the import takes most of the start time. Each process receives calls
through a pipe. It ends with the process that started it, also if that is
killed.
"""

from concurrent import futures
import contextlib
import functools
import logging
import multiprocessing
import os
import random
import socket
import threading
import time

import tensorflow as tf

tf1 = tf.compat.v1


class Process:
  """A process of a cluster, in the process that started it."""

  def __init__(self, context, do, spec, job, number):
    self.name = f"/job:{job}/task:{number}"
    self._pipe, end = context.Pipe()
    self.process = context.Process(
        target=_run, args=(end, do, spec, job, number), daemon=True)
    self.process.start()
    end.close()

  def tell(self, name, **arguments):
    """Makes the process call the function of this name."""
    self._pipe.send((name, arguments))

  def answer(self, report=lambda value: None):
    """Waits for the result of the function.

    Args:
      report: A function that is called with each argument of `Task.report`.

    Returns:
      The result of the function.

    Raises:
      RuntimeError: If the function failed, or the process has ended.
    """
    while True:
      try:
        kind, value = self._pipe.recv()
      except (EOFError, OSError):
        self.process.join()
        raise RuntimeError(f"{self.name} ended with status "
                           f"{self.process.exitcode}.") from None
      if kind == "error":
        raise RuntimeError(f"{self.name} failed: {value}")
      if kind == "value":
        return value
      report(value)

  def ask(self, name, **arguments):
    self.tell(name, **arguments)
    return self.answer()

  def kill(self):
    self.process.kill()
    self.process.join()
    self._pipe.close()


class Cluster:
  """A context with a process for each task.

  Attributes:
    spec: {job: [address]}.
    tasks: {(job, number): Process}.
  """

  def __init__(self, functions, preload=(), coordinator=False, **jobs):
    """Prepares a cluster, which `with` starts.

    Args:
      functions: The functions that a task can call. Their first argument is its
        `Task`. Their other arguments and results must be picklable.
      preload: Modules to import before the processes are forked.
      coordinator: Whether to start a process without a server, the task
        ("coordinator", 0), which is not in `spec`.
      **jobs: The number of tasks of each job.
    """
    ports = iter(free_ports(sum(jobs.values())))
    self.spec = {job: [f"localhost:{next(ports)}" for _ in range(n)]
                 for job, n in jobs.items()}
    self.tasks = {}
    self._names = [(job, i) for job, n in jobs.items() for i in range(n)]
    self._names += [("coordinator", 0)] * coordinator
    self._functions = {f.__name__: f for f in functions}
    self._context = multiprocessing.get_context("forkserver")
    self._context.set_forkserver_preload([__name__, "wrapopt", *preload])

  def __enter__(self):
    try:
      for name in self._names:
        self._start(*name)
      for process in self.tasks.values():
        process.answer()
    except BaseException:
      self.__exit__()
      raise
    return self

  def _start(self, job, number):
    process = Process(self._context, self._functions, self.spec, job, number)
    self.tasks[job, number] = process
    return process

  def restart(self, job, number):
    """Kills a task and starts it again; returns its `Process`."""
    self.tasks[job, number].kill()
    process = self._start(job, number)
    process.answer()
    return process

  def __exit__(self, *_):
    for process in self.tasks.values():
      process.kill()


def ask_all(name, arguments):
  """Makes processes call the function of this name, at the same time.

  Args:
    name: The name.
    arguments: {Process: its arguments, a dict}.

  Returns:
    The results, a list.

  Raises:
    RuntimeError: If one fails. The others may still wait for it.
  """
  pool = futures.ThreadPoolExecutor(len(arguments))
  waiting = [pool.submit(process.ask, name, **of)
             for process, of in arguments.items()]
  for done in futures.as_completed(waiting):
    done.result()
  return [done.result() for done in waiting]


def free_ports(n):
  """Finds n free ports, others than connections are given if there are any."""
  with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="utf-8") as f:
    first, last = map(int, f.read().split())
  others = [*range(10000, first), *range(last + 1, 65536)]
  ports = set()
  while len(ports) < n:
    port = random.SystemRandom().choice(others or range(10000, 65536))
    with contextlib.suppress(OSError):  # Taken.
      socket.create_server(("", port)).close()
      ports.add(port)
  return list(ports)


class Task:
  """This process, a task of a cluster.

  Attributes:
    device: Its device.
    job: The name of its job.
    number: Its number in the job.
    report: A function that passes its argument to the process that waits.
    server: Its `tf.distribute.Server`; None for a coordinator.
    spec: {job: [address]} of the cluster.
    strategy: The strategy of a coordinator.
    coordinator: Its `ClusterCoordinator`.
  """

  def __init__(self, spec, job, number, report):
    self.job, self.number, self.spec = job, number, spec
    self.device, self.report = f"/job:{job}/task:{number}", report
    self.server = None if job not in spec else tf.distribute.Server(
        tf.train.ClusterSpec(spec), job_name=job, task_index=number,
        # Many processes share this machine.
        config=tf1.ConfigProto(intra_op_parallelism_threads=1,
                               inter_op_parallelism_threads=8))

  def placement(self):
    """A device function: variables on the parameter servers, other ops here."""
    return tf1.train.replica_device_setter(
        cluster=tf.train.ClusterSpec(self.spec), worker_device=self.device)

  def config(self):
    """A session config: do not wait for other workers, or fail with one."""
    return tf1.ConfigProto(device_filters=["/job:ps", self.device])

  def session(self, graph):
    """A session of the graph, whose variables the first task initializes.

    An initializer assigns a variable again just after it has made it, which
    may undo a step of another task. So those wait for a variable that is made
    after all others.
    """
    with graph.as_default(), tf1.device(self.placement()):
      init = tf1.global_variables_initializer()
      local_init = tf1.local_variables_initializer()
      first, *_ = tf1.global_variables()
      ready = tf1.Variable(
          True, trainable=False, collections=(), use_resource=True,
          name=f"{first.op.name}_is_ready")
      is_ready = tf1.is_variable_initialized(ready)
    session = tf1.Session(self.server.target, graph=graph, config=self.config())
    if self.number == 0:
      session.run(init)
      session.run(ready.initializer)
    while not session.run(is_ready):
      time.sleep(0.05)
    session.run(local_init)
    return session

  @functools.cached_property
  def strategy(self):
    return tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(self.spec), rpc_layer="grpc"))

  @functools.cached_property
  def coordinator(self):
    return tf.distribute.coordinator.ClusterCoordinator(self.strategy)

  def scheduler(self, step, batches):
    """A function that makes a worker take a step with a batch of its own.

    Args:
      step: A function of inputs and targets that takes a step.
      batches: A function that makes the data set of a worker.
    """
    on_worker = tf.function(lambda iterator: step(*next(iterator)))
    iterator = iter(self.coordinator.create_per_worker_dataset(batches))
    return lambda: self.coordinator.schedule(on_worker, (iterator,))


def _log_lost_sessions():
  """Prints to stderr why a monitored session is recreated.

  Variables that are not in a checkpoint then have their initial values, without
  another sign. TensorFlow logs the error as one of many INFO messages.
  """
  logger = tf.get_logger()
  logger.setLevel(logging.INFO)
  logger.addFilter(lambda record: record.levelno > logging.INFO or
                   "new session will be created" in record.getMessage())


def _end_with_parent():
  multiprocessing.parent_process().join()
  os._exit(0)  # At once, because the other thread may be inside TensorFlow.


def _run(pipe, functions, spec, job, number):
  """The main function of a process."""
  threading.Thread(target=_end_with_parent, daemon=True).start()
  # On this machine, without a GPU.
  os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
  for name in [x for x in os.environ if x.lower().endswith("_proxy")]:
    del os.environ[name]
  _log_lost_sessions()
  task = Task(spec, job, number, lambda value: pipe.send(("report", value)))
  with contextlib.suppress(EOFError, OSError):  # The parent has ended.
    pipe.send(("value", None))
    while True:
      name, arguments = pipe.recv()
      try:
        pipe.send(("value", functions[name](task, **arguments)))
      except Exception as e:  # pylint: disable=broad-except
        pipe.send(("error", f"{type(e).__name__}: {e}"))
