"""Prints an SBOM of the wheel: what is compiled into its libraries.

Usage: sbom.py WRAPOPT_VERSION COMPONENT...

A COMPONENT is "NAME VERSION LICENSE PURL". Its version is "?" if nobody knows
it. A license of "-" means that the component is used in the build alone, as a
compiler is. The format is CycloneDX; the place in the wheel is that of PEP 770.
"""

import json
import sys

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL


def component(text):
  """The component that an argument describes."""
  name, version, terms, purl = text.split()
  return Component(
      name=name, version=None if version == "?" else version, bom_ref=name,
      type=ComponentType.LIBRARY, purl=PackageURL.from_string(purl),
      scope=(ComponentScope.EXCLUDED if terms == "-"
             else ComponentScope.REQUIRED),
      licenses=[] if terms == "-" else [LicenseExpression(terms)])


def main():
  version, *components = sys.argv[1:]
  wrapopt = Component(
      name="wrapopt", version=version, bom_ref="wrapopt",
      type=ComponentType.LIBRARY, purl=PackageURL("pypi", None, "wrapopt",
                                                  version))
  bom = Bom(components=map(component, components))
  bom.metadata.component = wrapopt
  bom.register_dependency(wrapopt, bom.components)
  made = json.loads(JsonV1Dot6(bom).output_as_string())
  # They differ in each run, and a build is reproducible.
  del made["serialNumber"], made["metadata"]["timestamp"]
  print(json.dumps(made, indent=1, sort_keys=True))


if __name__ == "__main__":
  main()
