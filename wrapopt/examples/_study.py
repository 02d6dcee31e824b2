"""A study: contenders are tuned on tasks, trained, and compared."""

import functools
from typing import Any, NamedTuple

import numpy as np

from wrapopt.examples import _command
from wrapopt.examples import _plots


class Found(NamedTuple):
  """The results of a contender in a task.

  Attributes:
    best: The setting of the least error on validation data, or None.
    tried: [(setting, its error)].
    errors: The result of the training function for each seed.
  """
  best: Any
  tried: list
  errors: list


def compare(tasks, contenders, trainer_of, points, tuning_seeds, seeds):
  """Tunes all contenders in all tasks, and trains them with their best setting.

  Args:
    tasks: The names of the tasks.
    contenders: {contender: the settings to choose from}. There may be none.
    trainer_of: A function of a task and of {contender: Found} so far, which
      returns a function of a contender, a setting, a seed, the points after
      which to evaluate, and the part of the data to evaluate on. It trains once
      and returns the errors, or rows that end with an error.
    points: The points after which to evaluate. The tuning uses the last one.
    tuning_seeds: The seeds of the runs that choose a setting.
    seeds: The seeds of the runs that are measured.

  Returns:
    {task: {contender: Found}}.
  """
  runs = sum(len(settings) * len(tuning_seeds) + len(seeds)
             for settings in contenders.values())
  results = {}
  with _command.progress(total=len(tasks) * runs) as progress:

    def train_all(train_one, task, contender, setting, seeds, *evaluation):
      progress.set_postfix_str(f"{task}: {contender}")
      errors = []
      for seed in seeds:
        errors.append(train_one(contender, setting, seed, *evaluation))
        progress.update()
      return errors

    for task in tasks:
      results[task] = found = {}
      train = functools.partial(train_all, trainer_of(task, found), task)
      for contender, settings in contenders.items():
        tried = []
        for setting in settings:
          errors = train(contender, setting, tuning_seeds, points[-1:],
                         "validation")
          tried.append((setting, float(np.mean(_last(errors)))))
        # A run that diverges may have no number as its error.
        best, _ = min(tried, default=(None, None),
                      key=lambda of: np.nan_to_num(of[1], nan=np.inf))
        found[contender] = Found(best, tried, train(
            contender, best, seeds, points, "held_out"))
  return results


def _last(errors):
  """The last errors of all seeds."""
  return np.array([np.ravel(of_seed)[-1] for of_seed in errors])


def of_seeds(errors):
  """The mean, the least and the largest of the last errors of all seeds."""
  last = _last(errors)
  return f"{last.mean():.2f} ({last.min():.2f} - {last.max():.2f})"


def print_tables(results, tasks, when, header, cells):
  """Prints the table of each task.

  Args:
    results: As those of `compare`.
    tasks: {name: `_tasks.Task`}.
    when: On what the errors were measured.
    header: The names of more columns.
    cells: A function of a Found that returns what these show.
  """
  for name, found in results.items():
    _command.print_table(
        f"{name}: {tasks[name].label}, {when}",
        ["", "mean (least - largest)", *header],
        [[contender, of_seeds(of.errors), *cells(of)]
         for contender, of in found.items()])


def panel(title, label, points, errors, styles):
  """The curves of {contender: errors of the seeds} over the points."""
  return _plots.Panel(title, label, {
      contender: (points, y, styles[contender])
      for contender, y in errors.items()})
