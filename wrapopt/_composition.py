"""Checks which optimizer a wrapper may contain.

A wrapper may be anywhere around or inside another one, at any depth, unless
`REFUSED` (of `tf.compat.v1.train`) or `REFUSED_IN_KERAS` lists the pair.
"""

import tensorflow as tf

_Optimizer = tf.compat.v1.train.Optimizer

_GATE = "DropStaleGradientOptimizer"
_ELASTIC = "ElasticAverageOptimizer"
_MODEL = "ModelAverageOptimizer"
_MOVING = "MovingAverageOptimizer"
_SHARDS = "CrossShardOptimizer"
_FREE = "ScheduleFreeOptimizer"
_PRIMAL = "PrimalAverageOptimizer"
# They train between z and its average x.
_BETWEEN = (_PRIMAL, _FREE)

NAMES = (_SHARDS, _GATE, _ELASTIC, _MODEL, _MOVING, *_BETWEEN)

_OWN_STEPS = ("a gate counts updates of shared weights, and these weights are "
              "local to a worker. Wrap the gate around")
_ONE_CENTER = "a variable has one center. Use one of the two optimizers"
_SEVERAL_DECAYS = ("one optimizer keeps several averages in one pass. Give it "
                   "several decays: average_decay=[0.99, 0.999]")

_AVERAGES_ITSELF = ("{between} keeps an average of its own, from which its "
                    "weights follow. Use one of the two")
_ONE_WRITER = ("the state of {between} counts the steps of one worker, and a "
               "gate serves several")
_ONE_OF_ITS_KIND = ("a variable has one average of this kind. Use one of the "
                    "two")


def _around_and_inside(between, others, gate):
  """{(outer, inner): the reason} of those that train between z and x."""
  found = {}
  for name in between:
    for other in (*others, gate):
      why = _ONE_WRITER if other == gate else _AVERAGES_ITSELF
      found[name, other] = found[other, name] = why.format(between=name)
    found.update({(name, other): _ONE_OF_ITS_KIND for other in between})
  return found


# {(outer, inner): the reason}.
REFUSED = {
    (_MOVING, _MOVING): _SEVERAL_DECAYS,
    (_GATE, _GATE): (
        "a gradient passes one gate. Use the lower limit of the two"),
    (_SHARDS, _SHARDS): "gradients would be summed twice. Use one of the two",
    **{(outer, _GATE): _OWN_STEPS for outer in (_ELASTIC, _MODEL)},
    **{(outer, inner): _ONE_CENTER for outer in (_ELASTIC, _MODEL)
       for inner in (_ELASTIC, _MODEL)},
    **_around_and_inside(_BETWEEN, (_ELASTIC, _MODEL, _MOVING), _GATE),
}

_IN_KERAS_BETWEEN = ("PrimalAverage", "ScheduleFree")
_GATE_IN_KERAS = "DropStaleGradient"

REFUSED_IN_KERAS = {
    **_around_and_inside(_IN_KERAS_BETWEEN,
                         ("Lookahead", "MovingAverage", "SWA"), _GATE_IN_KERAS),
    (_GATE_IN_KERAS, _GATE_IN_KERAS): REFUSED[_GATE, _GATE],
    ("Lookahead", "Lookahead"): (
        "a variable has one set of slow weights. Use one of the two"),
    ("MovingAverage", "MovingAverage"): _SEVERAL_DECAYS,
    ("SWA", "SWA"): "a variable has one mean of this kind. Use one of the two",
}

# {a wrapper around an optimizer of TensorFlow that takes its steps in another
# thread: the reason}.
_SYNC = tf.compat.v1.train.SyncReplicasOptimizer
_LATER = ("a thread of the chief takes its steps, for all workers, and not the "
          "op that `apply_gradients` returns. Wrap the SyncReplicasOptimizer "
          "around the {outer}")
_REFUSED_AROUND_SYNC = {
    **dict.fromkeys((_GATE, _MOVING), _LATER),
    **dict.fromkeys((_ELASTIC, _MODEL), (
        "it averages the gradients of workers that share weights, and these "
        "weights are local to a worker. Use one of the two")),
}

# An optimizer of another package does not tell the wrappers around it whether a
# step was taken, and where variables must be made.
_HIDDEN = {
    (_MOVING, inner): (
        "{hider} between the two does not tell whether a step was taken. Wrap "
        "{hider} around both")
    for inner in (_GATE, _ELASTIC, _MODEL)
}

# Kinds of optimizers. A class or one of its bases is in the package.
_V1, _KERAS = "tf.compat.v1.train", "Keras 3"
_PACKAGES = {"tensorflow_addons": "TensorFlow Addons",
             "tf_keras": "tf_keras (Keras 2)", "keras": _KERAS}

# {a wrapper of `wrapopt`: that of `wrapopt.keras`}.
_IN_KERAS = {_MOVING: "MovingAverage", _GATE: _GATE_IN_KERAS,
             **dict(zip(_BETWEEN, _IN_KERAS_BETWEEN))}


def wrong_kind(argument, wanted, outer, opt):
  """The error for an argument that a wrapper cannot wrap.

  Args:
    argument: Its name.
    wanted: What it must be.
    outer: The class of the wrapper.
    opt: The argument: an optimizer of another kind, or anything else.

  Returns:
    A TypeError.
  """
  must = f"`{argument}` must be {wanted}, got "
  if isinstance(opt, type):
    return TypeError(f"{must}the class {opt.__module__}.{opt.__qualname__}. "
                     "Make an optimizer: call the class.")
  must += f"{type(opt).__module__}.{type(opt).__qualname__}"
  kind, in_keras = _kind(opt), argument == "optimizer"
  if kind is None:
    return TypeError(f"{must}.")
  if kind == (_V1 if in_keras else _KERAS):
    here, there = (({x: name for name, x in _IN_KERAS.items()}, "wrapopt")
                   if in_keras else (_IN_KERAS, "wrapopt.keras"))
    name = here.get(_name(outer, here))
    remedy = (f"Use {there}.{name} for it" if name
              else f"The wrappers in {there} are for it")
  else:
    remedy = "wrapopt has no wrappers for these. Use the optimizer of " + (
        "`keras.optimizers`, and a model of Keras 3" if in_keras
        else "tf.compat.v1.train, or wrapopt.keras with that of "
        "`keras.optimizers` and a model of Keras 3")
  return TypeError(f"{must}, an optimizer of {kind}. {remedy}.")


def _kind(opt):
  """The kind of an optimizer, or None, without an import of its package."""
  if isinstance(opt, _Optimizer):
    return _V1
  modules = [c.__module__.split(".") for c in type(opt).__mro__]
  return next((kind for package, kind in _PACKAGES.items()
               if any(m[0] == package and "optimizers" in m
                      for m in modules)), None)


def check(outer, opt):
  """Raises an error if a wrapper must not contain an inner optimizer.

  Args:
    outer: The class of the wrapper.
    opt: Its inner optimizer, a `tf.compat.v1.train.Optimizer`.

  Raises:
    ValueError: If it must not contain `opt`, or an optimizer inside `opt`.
  """
  outer = _name(outer, NAMES)
  if outer in _REFUSED_AROUND_SYNC and _wraps_sync(opt):
    raise _refused("opt", outer, _SYNC.__name__, _REFUSED_AROUND_SYNC[
        outer].format(outer=outer), _describe(opt))
  for inner, hider in _inside(opt, None):
    why = REFUSED.get((outer, inner))
    if why is None and hider is not None:
      why = _HIDDEN.get((outer, inner))
    if why is not None:
      raise _refused("opt", outer, inner, why.format(hider=hider),
                     _describe(opt))


def check_in_keras(outer, opt, inside):
  """As `check`, for a wrapper of `wrapopt.keras`.

  Args:
    outer: The class of the wrapper.
    opt: Its inner optimizer, a Keras optimizer.
    inside: All optimizers inside `opt`, at any depth.

  Raises:
    ValueError: If it must not contain `opt`, or one of these.
  """
  names = {name for pair in REFUSED_IN_KERAS for name in pair}
  outer = _name(outer, names)
  for x in [opt, *inside]:
    inner = _name(type(x), names)
    why = REFUSED_IN_KERAS.get((outer, inner))
    if why is not None:
      raise _refused("optimizer", outer, inner, why, type(opt).__qualname__)


def check_import(subject, opt, base):
  """Raises an error if an optimizer comes from an earlier import of wrapopt.

  It would be taken for an optimizer without averages.

  Args:
    subject: What it is, such as "`optimizer` of SWA".
    opt: An object.
    base: The base class of wrappers, of this import.

  Raises:
    ValueError: If `opt` is a wrapper of another one.
  """
  if not isinstance(opt, base) and any(
      (c.__module__, c.__qualname__) == (base.__module__, base.__qualname__)
      for c in type(opt).__mro__):
    raise ValueError(
        f"{subject} must be made with the wrapopt that is imported now, got a "
        f"{type(opt).__qualname__} of an earlier import. Make the optimizer "
        "again, or restart Python.")


def _refused(argument, outer, inner, why, got):
  return ValueError(f"`{argument}` of {outer} must not be or hold a {inner}: "
                    f"{why}. Got {got}.")


def _name(cls, names):
  """The public name of the class that `cls` is or is derived from, or None."""
  return next((c.__name__ for c in cls.__mro__ if c.__name__ in names and
               c.__module__.split(".")[0] == "wrapopt"), None)


def _wrapped(opt):
  return [x for x in vars(opt).values() if isinstance(x, _Optimizer)]


def _inside(opt, hider):
  """Yields (one of NAMES, the optimizer that hides it or None)."""
  name = _name(type(opt), NAMES)
  if name is not None:
    yield name, hider
  # Only wrappers have the attribute.
  if getattr(opt, "_has_own_step", True):
    hider = type(opt).__qualname__
  for inner in _wrapped(opt):
    yield from _inside(inner, hider)


def _wraps_sync(opt):
  return isinstance(opt, _SYNC) or any(map(_wraps_sync, _wrapped(opt)))


def _describe(opt):
  inner = ", ".join(map(_describe, _wrapped(opt)))
  return f"{type(opt).__qualname__}{f'({inner})' if inner else ''}"
