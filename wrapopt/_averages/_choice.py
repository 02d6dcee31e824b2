"""Which variables an optimizer averages: its argument `variables`."""

import collections.abc

import numpy as np


class Chosen(list):
  """Variables that an argument `variables` lists.

  A copy lists the same variables, or their copies if these are made before.
  """

  def __deepcopy__(self, memo):
    return Chosen(memo.get(id(x), x) for x in self)


def checked(variables, parts_of, kinds):
  """An argument `variables`, checked.

  Args:
    variables: None, a function, or a sequence.
    parts_of: A function of an element of the sequence. It returns the variables
      that the element stands for, or None if it stands for none.
    kinds: The kinds of elements, for errors.

  Returns:
    None, the function, or a Chosen.

  Raises:
    TypeError: If it is something else.
    ValueError: If the sequence is empty.
  """
  if variables is None:
    return None
  if (isinstance(variables, collections.abc.Sequence) and
      not isinstance(variables, (str, bytes))):
    if not variables:
      raise ValueError("`variables` must hold at least one variable, got none. "
                       "None averages all variables.")
    chosen = Chosen()
    for i, x in enumerate(variables):
      parts = parts_of(x)
      if parts is None:
        raise TypeError(f"`variables[{i}]` must be {kinds}, got {x!r}.")
      chosen += parts
    return chosen
  if callable(variables) and parts_of(variables) is None:
    return variables
  raise TypeError(
      "`variables` must be None (all variables), a list of variables, or a "
      "function of a variable that returns whether it is averaged, got "
      f"{variables!r}.")


def answer(function, variable, name, argument="variables"):
  """The answer of a function about a variable or layer of a name: a bool."""
  chosen = function(variable)
  if not isinstance(chosen, (bool, np.bool_)):
    raise TypeError(f"A function `{argument}` must return True or False, got "
                    f"{chosen!r} for '{name}'.")
  return bool(chosen)
