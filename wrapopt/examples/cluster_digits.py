"""Three workers that train independently on digits, and average their weights.

One parameter server, a chief and two workers, each a process on this machine.
Each worker has a third of scikit-learn's scans of digits and trains a small
convolutional net with momentum. Every few steps `wrapopt.ModelAverageOptimizer`
replaces the weights of all workers by their mean. At the end the example prints
the accuracy of each worker's weights before the last mean, of the mean, and of
two nets that one worker trained alone, on a third of the scans and on all.

--kill-worker kills the last worker in the middle of the run. The others
continue without it.
"""

import numpy as np
import tensorflow as tf

import wrapopt
from wrapopt.examples import _cluster
from wrapopt.examples import _report
from wrapopt.examples import _tasks

tf1 = tf.compat.v1

_WORKERS = 3  # Including the chief.
_INTERVAL = 20


def average(task, rounds, seed):
  """Trains as a worker of the cluster.

  Args:
    task: Its `_cluster.Task`. The chief's reports the number of rounds that are
      over, first 0 once other workers may start.
    rounds: The number of rounds.
    seed: The seed of the split, the weights and the batches.

  Returns:
    A dict: the numbers "scans" and "steps" of its training, and "curve": for
    each of its rounds the number, and the accuracies before and after.
  """
  is_chief = task.job == "chief"
  getter = wrapopt.ModelAverageCustomGetter(task.device)
  with tf.Graph().as_default(), tf1.device(task.placement()):
    with tf1.variable_scope("", custom_getter=getter, use_resource=True):
      net = _make_net(0 if is_chief else 1 + task.number, _WORKERS, seed)
    global_step = tf1.train.get_or_create_global_step()
    opt = wrapopt.ModelAverageOptimizer(
        tf1.train.MomentumOptimizer(0.02, 0.9), _WORKERS, is_chief, getter,
        _INTERVAL, min_workers=2,
        round_timeout_secs=20.0)  # For late or dead workers.
    train_op = opt.minimize(net.loss, global_step)
    with tf1.train.MonitoredTrainingSession(
        task.server.target, is_chief, config=task.config(),
        hooks=[opt.make_session_run_hook()]) as session:
      over, curve = 0, []
      while True:
        if is_chief:
          task.report(over)
        if over >= rounds:
          return {"scans": net.samples, "steps": _INTERVAL * len(curve),
                  "curve": curve}
        net.train(session, train_op, _INTERVAL - 1)
        own = net.accuracy(session)
        net.train(session, train_op)
        over = int(session.run(global_step))
        curve.append((over, own, net.accuracy(session)))


def alone(_, steps, parts, seed):
  """Trains one net on a part of the scans, or on all."""
  with tf.Graph().as_default(), tf1.Session() as session:
    net = _make_net(0, parts, seed)
    train_op = tf1.train.MomentumOptimizer(0.02, 0.9).minimize(net.loss)
    session.run(tf1.global_variables_initializer())
    net.train(session, train_op, steps)
    return {"scans": net.samples, "steps": steps,
            "accuracy": net.accuracy(session)}


def _make_net(part, parts, seed):
  tf1.set_random_seed(seed)
  data, held_out = _tasks.load_digits(seed)
  return _tasks.GraphNet([x[part::parts] for x in data], held_out, 8,
                         [seed, part, parts])


def run(out="results/cluster_digits", rounds=60, kill_worker=False, seed=0):
  with _cluster.Cluster([average, alone], preload=[_tasks.__name__], ps=1,
                        chief=1, worker=_WORKERS - 1) as cluster, \
      _report.progress(total=rounds, unit="round") as progress:
    _, chief, *others = cluster.tasks.values()
    last = others[-1]

    def on_round(over):
      if over == 0:
        for worker in others:
          worker.tell("average", rounds=rounds, seed=seed)
      progress.update(over - progress.n)
      if kill_worker and over >= rounds // 2 and last.process.is_alive():
        last.kill()
        progress.write(f"{last.name} was killed after {over} rounds.")

    chief.tell("average", rounds=rounds, seed=seed)
    workers = {chief.name: chief.answer(on_round)}
    for worker in others:
      workers[worker.name] = (
          None if kill_worker and worker is last else worker.answer())
    baselines = [
        chief.ask("alone", steps=rounds * _INTERVAL, parts=parts, seed=seed)
        for parts in (_WORKERS, 1)]

  over, _, mean = np.transpose(workers[chief.name]["curve"])
  rows, curves = [], {"mean": (over, 100 * mean, "k")}
  for i, (name, worker) in enumerate(workers.items()):
    if worker is None:
      rows.append([name, "killed"])
      continue
    over, own, mean = np.transpose(worker["curve"])
    rows.append([name, worker["scans"], worker["steps"], f"{own[-1]:.2%}",
                 f"{mean[-1]:.2%}"])
    curves[name.removeprefix("/job:").replace("/task:", " ")] = (
        over, 100 * own, f"C{i}:")
  for net, style in zip(baselines, ("C7--", "C7-.")):
    rows.append(["alone", net["scans"], net["steps"], f"{net['accuracy']:.2%}"])
    curves[f"alone, {net['scans']} scans"] = (
        [1, rounds], [100 * net["accuracy"]] * 2, style)
  _report.print_table(
      "accuracy on held-out scans, of a worker's own weights just before the "
      "last mean,\nand of that mean", ["", "scans", "steps", "own", "mean"],
      rows)
  _report.draw_curves(
      out / "curves.png", "model averaging of digits: workers just before each "
      "mean", f"rounds, of {_INTERVAL} steps of each worker",
      [(curves, {"ylabel": "held-out accuracy (%)"})], shown=(0.1, 1))
  return {"workers": workers, "alone": baselines}


main = _report.command("cluster_digits", __doc__, run)

if __name__ == "__main__":
  main()
