"""Where a source can be broken, and how: mutants of Python and of C++."""

import ast
import re
import typing

import cosmic_ray.ast
from cosmic_ray import mutating
from cosmic_ray.operators import operator
from cosmic_ray.operators import provider
from parso.python import tree


class Mutant(typing.NamedTuple):
  """A change of a source.

  Attributes:
    file: The path of the source.
    line: The number of the first line that changes.
    change: The name of the kind of the change.
    before: These lines, without their indentation; one string.
    after: What they become.
    text: The source that has the mutant.
  """
  file: str
  line: int
  change: str
  before: str
  after: str
  text: str


def _mutant(file, source, change, text):
  old, new = source.split("\n"), text.split("\n")
  first = next(i for i, pair in enumerate(zip(old, new)) if pair[0] != pair[1])
  same = next(i for i, pair in enumerate(zip(old[::-1], new[::-1]))
              if pair[0] != pair[1])
  same = min(same, len(old) - first - 1, len(new) - first)
  joined = lambda lines: " ".join(" ".join(lines).split())
  return Mutant(file, first + 1, change, joined(old[first:len(old) - same]),
                joined(new[first:len(new) - same]), text)


class DropCall(operator.Operator):
  """A call whose result is not used is left out."""

  def mutation_positions(self, node):
    if node.type == "simple_stmt":
      call = node.children[0]
      if (call.type == "atom_expr" and call.children[-1].type == "trailer" and
          call.children[-1].children[0] == "("):
        yield call.start_pos, call.end_pos

  def mutate(self, node, index):
    call = node.children[0]
    prefix = call.get_first_leaf().prefix
    node.children[0] = tree.Name("pass", call.start_pos, prefix=prefix)
    return node

  @classmethod
  def examples(cls):
    return (operator.Example("f(x)\ny = f(x)\n", "pass\ny = f(x)\n"),)


class ReturnAtOnce(operator.Operator):
  """A function returns None before its first statement."""

  def mutation_positions(self, node):
    if node.type == "funcdef" and node.children[-1].type == "suite":
      for statement in self._first(node):
        yield statement.start_pos, statement.end_pos

  @staticmethod
  def _first(node):
    """Its first statement that is not the docstring, in a list."""
    statements = node.children[-1].children[1:]
    if node.get_doc_node():
      statements = statements[1:]
    # Nobody calls a method that all subclasses define.
    return [first for first in statements[:1]
            if first.get_code().strip() != "raise NotImplementedError"]

  def mutate(self, node, index):
    [first] = self._first(node)
    suite = node.children[-1]
    prefix = first.get_first_leaf().prefix
    suite.children[suite.children.index(first)] = tree.Name(
        "return None\n", first.start_pos, prefix=prefix)
    return node

  @classmethod
  def examples(cls):
    return (operator.Example(
        'def f(x):\n  "D."\n  if x:\n    y()\n  z()\n',
        'def f(x):\n  "D."\n  return None\n  z()\n'),)


# One other operator for each.
_REPLACED = ("Binary", (
    "Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_Mul",
    "Pow_Mul", "LShift_RShift", "RShift_LShift", "BitOr_BitAnd",
    "BitAnd_BitOr", "BitXor_BitAnd")), ("Comparison", (
        "Eq_NotEq", "NotEq_Eq", "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt",
        "Is_IsNot", "IsNot_Is"))


def _operators():
  """{name: operator of cosmic-ray}."""
  known = provider.OperatorProvider()
  names = [f"Replace{kind}Operator_{which}"
           for kind, all_which in _REPLACED for which in all_which]
  names += [name for name in known if not name.startswith((
      "ReplaceBinary", "ReplaceComparison", "ReplaceUnary", "Variable"))]
  names += ["ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_USub_UAdd"]
  return {name: known[name]() for name in names} | {
      kind.__name__: kind() for kind in (DropCall, ReturnAtOnce)}


def _of_python(file, source):
  """Makes the mutants of a source in Python, by cosmic-ray: functions."""
  nodes = list(cosmic_ray.ast.ast_nodes(cosmic_ray.ast.get_ast(source)))
  for name, change in _operators().items():
    for i in range(sum(len(list(change.mutation_positions(node)))
                       for node in nodes)):
      yield lambda name=name, change=change, i=i: _valid(
          file, source, name, change, i)


def _valid(file, source, name, change, i):
  try:
    text = mutating.mutate_code(source, change, i)
    old, new = (ast.dump(ast.parse(code)) for code in (source, text))
  except SyntaxError:
    return None
  except AttributeError:
    # cosmic-ray takes all in `except (a.b, c)` for names.
    if name == "ExceptionReplacer":
      return None
    raise
  # cosmic-ray takes the `*` of parameters for an operator.
  if new == old or new.count("posonlyargs=[]") != old.count("posonlyargs=[]"):
    return None
  return _mutant(file, source, name, text)


_SWAPPED = {
    "+": "-", "-": "+", "*": "/", "/": "*", "%": "*", "+=": "-=", "-=": "+=",
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "&&": "||", "||": "&&"}
# {kind: (pattern, what takes its place)}, for code as the formatter leaves it:
# there are spaces around an operator of two operands.
_CHANGES = {
    "operator": (r"(?<=\s)(%s)(?=\s)" % "|".join(
        map(re.escape, sorted(_SWAPPED, key=len, reverse=True))),
                 lambda found: _SWAPPED[found[1]]),
    "number": (r"(?<![\w.])(\d+)(?![\w.])", r"(\1 + 1)"),
    "bool": (r"\b(true|false)\b",
             lambda found: "false" if found[1] == "true" else "true"),
    "not": (r"!(?=[\w(])", ""),
    "condition": (r"\b(if|while) \(([^;{}]*)(?=\) (?:\{|\w[^;{}]*;))",
                  r"\1 (!(\2)"),
    "step": (r"(?<=[ (])(\+\+|--)(?=\w)",
             lambda found: "--" if found[1] == "++" else "++"),
    "dropped": (r"(?<=[;{}:\n]\n)( *)(?!return|delete|throw|case|using)"
                r"([\w.\[\]>-]+(?: [-+*/|&]?= |\()[^;{}]*)(?=;\n)", r"\1"),
    "return": (r"\breturn (?!false;|0;|nullptr;|\{\};)([^;{}]+)(?=;)",
               "return {}"),
}


def _of_cc(file, source):
  """Makes the mutants of a source in C++: functions."""
  # Comments, strings and lines of the preprocessor are left as they are.
  code = re.sub(r'//.*|^ *#(?:.*\\\n)*.*|"(?:\\.|[^"\\\n])*"|'
                r"'(?:\\.|[^'\\\n])'",
                lambda found: re.sub(r"[^\n]", " ", found[0]), source,
                flags=re.M)
  for kind, (pattern, after) in _CHANGES.items():
    for found in re.finditer(pattern, code):
      new = after(found) if callable(after) else found.expand(after)
      yield lambda kind=kind, found=found, new=new: _mutant(
          file, source, kind, source[:found.start()] + new + source[
              found.end():])


def sites(file, source):
  """The sites of a source: functions that return a Mutant, or None."""
  return list((_of_python if file.endswith(".py") else _of_cc)(file, source))
