"""Adds to the site the pages of the sources, and the reference."""

import pathlib
import sysconfig

import griffe
from mkdocs.structure.files import File

_ROOT = pathlib.Path(__file__).parents[2]
_MODULES = ["wrapopt", "wrapopt.keras", "wrapopt.checkpoints", "wrapopt.ops",
            "wrapopt.sysconfig"]
_MATHJAX = (pathlib.Path(sysconfig.get_path("purelib")) /
            "mathjax/static/mathjax/es5")


def _reference():
  """Yields pairs: the name and the Markdown of a page."""
  package = griffe.load("wrapopt", search_paths=[_ROOT])
  for name in _MODULES:
    module = package[name.partition(".")[2]] if "." in name else package
    things = {export: module[export] for export in module.exports
              if module[export].is_class or module[export].is_function}
    yield name, f"::: {name}\n    options: {{members: false}}\n\n" + "".join(
        f"- [`{export}`]({name}.{export}.md): "
        f"{thing.docstring.value.splitlines()[0]}\n"
        for export, thing in things.items())
    for export in things:
      yield f"{name}.{export}", f"::: {name}.{export}\n"


def on_config(config):
  config["pages"] = dict(_reference())
  config.nav.insert(2, {"Reference": [
      {module: [{name.removeprefix(f"{module}.").replace(
                     module, f"{module}: overview"): f"reference/{name}.md"}
                for name in config["pages"] if name == module or (
                    name.rpartition(".")[0] == module and
                    name not in _MODULES)]}
      for module in _MODULES]})
  return config


def on_files(files, config):
  for pattern in ("*.md", "LICENSE", "cc/*.md", "tests/*.md", "wrapopt/*/*.md",
                  "wrapopt/docs/images/*.png"):
    for path in _ROOT.glob(pattern):
      files.append(File.generated(
          config, str(path.relative_to(_ROOT)), abs_src_path=str(path)))
  for name in ("core.js", "input/asciimath.js", "output/svg.js",
               "output/svg/fonts/tex.js", "startup.js"):
    files.append(File.generated(
        config, f"mathjax/{name}", abs_src_path=str(_MATHJAX / name)))
  for name, page in config["pages"].items():
    files.append(File.generated(config, f"reference/{name}.md", content=page))
  return files
