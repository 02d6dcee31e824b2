"""Combinations of settings that contain each pair of values."""

import itertools


def covering(factors, allowed=lambda row: True):
  """Few rows, in which each pair of values of two factors is in some row.

  The first values are the plain ones: a row has them where no pair asks for
  another. The result depends on nothing but the arguments.

  Args:
    factors: {name: [value, ...]}.
    allowed: A function of a dict with some of the factors: whether some row may
      have these values.

  Returns:
    A list of dicts. A pair that no allowed row has is left out.
  """
  def pairs_of(row):
    return set(itertools.combinations(
        [(name, row[name]) for name in factors if name in row], 2))

  def extended(row, new):
    """A whole row, or None."""
    missing = [name for name in factors if name not in row]
    if not missing:
      return row
    name = missing[0]
    # The values that bring the most new pairs first.
    for value in sorted(factors[name], key=lambda value: -len(
        new & pairs_of({**row, name: value}))):
      if allowed(wider := {**row, name: value}) and (
          found := extended(wider, new)):
        return found
    return None

  missing = {
      ((a, x), (b, y)): None
      for a, b in itertools.combinations(factors, 2)
      for x in factors[a] for y in factors[b] if allowed({a: x, b: y})}
  rows = []
  while missing:
    pair = next(iter(missing))
    row = extended(dict(pair), missing.keys())
    if row is None:
      del missing[pair]
      continue
    rows.append({name: row[name] for name in factors})
    for seen in pairs_of(rows[-1]):
      missing.pop(seen, None)
  return rows
