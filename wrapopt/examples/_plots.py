"""The figures of the examples."""

import contextlib
import os
from typing import NamedTuple

import numpy as np

from wrapopt import _extras


class Panel(NamedTuple):
  """Curves of a figure.

  Attributes:
    title: The title.
    label: What the y axis shows.
    curves: {label: (x, y, format of Matplotlib)}. `y` are numbers, one for each
      of `x`, or a list of these for each seed.
    x_scale: "linear" or "log".
  """
  title: str
  label: str
  curves: dict
  x_scale: str = "linear"


@contextlib.contextmanager
def _drawn(path, title, n_panels):
  """Makes a figure: yields its axes, the unused ones at last.

  Then it writes the figure and prints its path.
  """
  columns = 2 if n_panels == 4 else min(3, n_panels)
  rows = -(-n_panels // columns)
  # Readers who are colour-blind tell these colours apart.
  with _extras.load("matplotlib.style").context("petroff10"):
    figure = _extras.load("matplotlib.figure").Figure(
        (max(8, 4 * columns), max(5, 3.5 * rows)), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for ax in axes[n_panels:]:
      ax.axis("off")
    yield axes
    figure.suptitle(title)
    figure.savefig(path, dpi=100)
  print(path)


def draw_curves(path, title, x_label, panels, shown=(0, 0.9)):
  """Draws means of seeds, and as a band the least and the largest.

  Bands of many curves would hide each other: there are none of more than 7.

  Args:
    path: The image.
    title: The title.
    x_label: What the x axis shows.
    panels: `Panel`s.
    shown: The quantiles that limit the y axis. The first numbers of a training
      are far off.
  """
  with _drawn(path, title, len(panels)) as axes:
    for ax, panel in zip(axes, panels):
      means = []
      for label, (x, y, style) in panel.curves.items():
        seeds = np.atleast_2d(y)
        means.append(seeds.mean(axis=0))
        [line] = ax.plot(x, means[-1], style, label=label)
        if len(panel.curves) <= 7:
          ax.fill_between(x, seeds.min(axis=0), seeds.max(axis=0), alpha=0.13,
                          color=line.get_color(), linewidth=0)
      # Without those that diverge.
      best = np.nanmin([mean[-1] for mean in means])
      low, high = np.quantile(np.concatenate(
          [mean for mean in means if mean[-1] <= 10 * best]), shown)
      room = 0.1 * (high - low) or 1
      ax.set(title=panel.title, xlabel=x_label, ylabel=panel.label,
             ylim=(low - room, high + room), xscale=panel.x_scale)
      if panel.x_scale == "log":
        ax.xaxis.set_major_formatter("{x:g}")
      ax.grid(alpha=0.3)
    # In the empty corner, if there is one.
    lines, labels = axes[0].get_legend_handles_labels()
    if len(axes) > len(panels):
      axes[-1].legend(lines, labels, loc="center")
    else:
      axes[0].figure.legend(lines, labels, loc="outside lower center", ncols=4,
                            fontsize="small")


def draw_staleness(folder, title, panels):
  """Draws histograms of staleness: {title: {label: counts}}."""
  with _drawn(os.path.join(folder, "staleness.png"), title,
              len(panels)) as axes:
    for ax, (name, bars) in zip(axes, panels.items()):
      width = 0.8 / len(bars)
      for i, (label, counts) in enumerate(bars.items()):
        ax.bar(np.arange(len(counts)) + (i + 0.5) * width - 0.4, counts, width,
               label=label)
      ax.set_yscale("symlog", linthresh=1)
      ax.yaxis.set_major_formatter("{x:g}")
      ax.set(title=name, ylabel="gradients",
             xlabel="staleness: updates that the weights lacked\n(the last "
             f"bar: {len(counts) - 1} and more)")
      ax.legend()
