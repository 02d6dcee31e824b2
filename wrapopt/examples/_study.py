"""A study: contenders are tuned on tasks, trained, and compared."""

import numpy as np

from wrapopt.examples import _report


def compare(tasks, names, contenders, trainer_of, steps, tuning_seeds, seeds,
            quick):
  """Tunes all contenders in all tasks, and trains them with their best setting.

  Args:
    tasks: {name: `_tasks.Task`}.
    names: Those of the tasks to compare in.
    contenders: {contender: the settings to choose from}. There may be none.
    trainer_of: A function of a task's name, what it loads and its results so
      far, which returns a function of a contender, a setting, a seed, the
      points after which to evaluate, and the part of the data to evaluate on.
      It trains once and returns the errors, or rows that end with an error.
    steps: The steps of a training. The tuning evaluates after the last one.
    tuning_seeds: The seeds of the runs that choose a setting.
    seeds: The number of the runs that are measured.
    quick: Whether to use few data, settings and evaluations.

  Returns:
    Results: the points after which a training is evaluated, and for each task
    and contender a dict: the "best" setting, of the least error on validation
    data, or None; those that were "tried", [(setting, its error)]; and the
    "errors", what the training returned for each seed.
  """
  points = _report.points(steps, 4 if quick else 12)
  if quick:  # Two settings of the middle.
    tuning_seeds = tuning_seeds[:1]
    contenders = {contender: settings[len(settings) // 2:][:2]
                  for contender, settings in contenders.items()}
  runs = sum(len(settings) * len(tuning_seeds) + seeds
             for settings in contenders.values())
  results = {}
  with _report.progress(total=len(names) * runs) as progress:

    def train_all(train, contender, setting, seeds, *evaluation):
      errors = []
      for seed in seeds:
        errors.append(train(contender, setting, seed, *evaluation))
        progress.update()
      return errors

    for name in names:
      results[name] = found = {}
      train = trainer_of(name, tasks[name].load(12 if quick else 120), found)
      for contender, settings in contenders.items():
        progress.set_postfix_str(f"{name}: {contender}")
        tried = [(setting, float(np.mean(_last(train_all(
            train, contender, setting, tuning_seeds, points[-1:],
            "validation"))))) for setting in settings]
        # A run that diverges may have no number as its error.
        best, _ = min(tried, default=(None, None),
                      key=lambda of: np.nan_to_num(of[1], nan=np.inf))
        found[contender] = {"best": best, "tried": tried, "errors": train_all(
            train, contender, best, range(seeds), points, "held_out")}
  return {"points": points, "tasks": results}


def _last(errors):
  """The last errors of all seeds."""
  return np.array([np.ravel(of_seed)[-1] for of_seed in errors])


def of_seeds(found):
  """The mean, the least and the largest of the last errors of all seeds."""
  last = _last(found["errors"])
  return f"{last.mean():.2f} ({last.min():.2f} - {last.max():.2f})"


def print_table(title, found, header, cells):
  """Prints {contender: results}; `cells` of them are what `header` names."""
  _report.print_table(
      title, ["", "mean (least - largest)", *header],
      [[contender, of_seeds(of), *cells(of)]
       for contender, of in found.items()])


def panel(title, label, found, points, styles):
  """The curves of {contender: results} over the points."""
  return ({contender: (points, of["errors"], styles[contender])
           for contender, of in found.items()},
          {"title": title, "ylabel": label})
