"""Makes Markdown of docstrings: fences around examples and formulas; lists.

An indented block is a formula in the notation AsciiMath, in which names may
have several letters, unless something in it shows that it is code.
"""

import re

import griffe

_EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1\S.*)*", re.M)
_CODE = re.compile(r"\w\.[a-z_]|[\"#:@\\]|--")
_WORD = re.compile(r"[A-Za-z]\w*(?<!_)(?:_(?!\w|\())?(?:'s\b)?")
_SEVERAL = re.compile(r"^  (\w+(?:,\s+\w+)+):\s+(.*)$", re.M)
_RAISES = re.compile(r"^Raises:\n((?:  .*\n?)+)", re.M)
_SYMBOLS = {"alpha", "beta", "epsilon", "exp", "gamma", "lambda", "rho", "sqrt",
            "sum", "tau"}


def _word(match):
  """A name in AsciiMath, which takes unquoted letters one by one."""
  word, text, start, end = match[0], match.string, *match.span()
  base, _, index = word.partition("_")
  if word != "a" and (len(base) == 1 or base in _SYMBOLS) and word[-1] != "_":
    return base + (f'_"{index}"' if len(index) > 1 else index and f"_{index}")
  before = " " if re.search(r"[\w,] $", text[:start]) else ""
  after = " " if re.match(r" [A-Za-z]\b", text[end:]) else ""
  if len(index) == 1:
    return f'"{before}{base}"_{index}'
  return f'"{before}{word}{after}"'


def asciimath(formula):
  formula = re.sub(r"\^(-\w+)", r"^(\1)", formula).replace("+=", '" += "')
  return _WORD.sub(_word, formula).replace('" " ', " ")


def _one_each(match):
  """An entry for each of several names: `a, b: As there.`"""
  return "\n".join(f"  {name}: {match[2]}"
                   for name in re.split(r",\s+", match[1]))


def _raises(match):
  """A list of errors, if some of them are not named."""
  items = re.split(r"(?<=\.)\n  (?=\S)", match[1].strip())
  if all(re.match(r"[\w., ]+: ", item) for item in items):
    return match[0]
  return "**Raises:**\n\n" + "".join(
      f"- {' '.join(item.split())}\n" for item in items)


def _indent(line):
  return len(line) - len(line.lstrip())


def markdown(text):
  """Returns the Markdown of a docstring."""
  text = _EXAMPLE.sub(
      lambda match: f"{match[1]}```pycon\n{match[0]}\n{match[1]}```", text)
  text = _SEVERAL.sub(_one_each, text)
  text = _RAISES.sub(_raises, text)
  blocks, margin = [], 0
  for block in re.split(r"\n{2,}", text):
    lines = block.split("\n")
    indent = _indent(lines[0])
    if indent < margin + 4:
      margin = _indent(lines[-1])
    elif not _CODE.search(block):
      space = " " * margin
      block = "\n".join([f"{space}```asciimath"] + [
          f"{space}`{asciimath(line.strip())}`" for line in lines] + [
              f"{space}```"])
    blocks.append(block)
  return "\n\n".join(blocks)


class Markdown(griffe.Extension):

  def on_object(self, *, obj, **kwargs):
    if obj.docstring:
      obj.docstring.value = markdown(obj.docstring.value)
