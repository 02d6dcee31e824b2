"""Writes a wheel with the standard library only. The output is reproducible."""

import argparse
import base64
import hashlib
import re
import zipfile

# The format is https://packaging.python.org/specifications/ "Binary
# distribution format" and "Core metadata".


def _name(path):
  return path.rsplit("/", 1)[-1]


def metadata(args):
  """The METADATA file: name, description and requirements of the package."""
  lines = [
      "Metadata-Version: 2.4",
      f"Name: {args.package}",
      f"Version: {args.version}",
      f"Summary: {args.summary}",
      f"Keywords: {args.keywords}",
      f"License-Expression: {args.license}",
      *(f"License-File: {_name(path)}" for path in args.license_file),
      f"Requires-Python: {args.requires_python}",
  ]
  lines += [f"Classifier: {classifier}" for classifier in args.classifier]
  lines += [f"Project-URL: {url}" for url in args.url]
  lines += [f"Requires-Dist: {requirement}" for requirement in args.requires]
  extras = sorted(pair.split("=", 1) for pair in args.extra)
  lines += [f"Provides-Extra: {extra}"
            for extra in sorted({extra for extra, _ in extras})]
  for extra, requirement in extras:
    requirement, _, marker = requirement.partition(";")
    marker = f"{marker.strip()} and " if marker else ""
    lines.append(f'Requires-Dist: {requirement}; {marker}extra == "{extra}"')
  lines += ["Description-Content-Type: text/markdown", "", ""]
  with open(args.readme, encoding="utf-8") as f:
    return "\n".join(lines) + description(f.read(), args.url)


def description(readme, urls):
  """What a package index shows: there, relative links would lead nowhere."""
  source = dict(url.split(", ") for url in urls).get("Source")
  if not source:
    return readme
  return re.sub(
      r"(!\[[^\]]*)?\]\((?!\w+:|#)", lambda match: "{}]({}/{}/HEAD/".format(
          match[1] or "", source, "raw" if match[1] else "blob"), readme)


def wheel_info(args):
  """The WHEEL file, which installers read."""
  return (f"Wheel-Version: 1.0\n"
          f"Generator: {args.package} build_wheel.py\n"
          f"Root-Is-Purelib: false\n"
          f"Tag: {args.tag}\n")


def package_files(args):
  """{name in the wheel: bytes} of the package's files."""
  files = {}
  for pair in args.file:
    name, path = pair.split("=", 1)
    if not name.startswith(args.package + "/"):
      raise SystemExit(f"{name} must lie in {args.package}/: "
                       "a wheel holds one package's files")
    if name in files:
      raise SystemExit(f"{name} was given twice")
    with open(path, "rb") as f:
      files[name] = f.read()
  return files


def record_line(name, data):
  digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
  return f"{name},sha256={digest.rstrip(b'=').decode()},{len(data)}"


def write(path, files, info):
  """Writes a wheel whose bytes depend only on `files`.

  Args:
    path: of the wheel.
    files: [(name, bytes)], without RECORD.
    info: the folder of RECORD.
  """
  record = [record_line(name, data) for name, data in files]
  record.append(f"{info}/RECORD,,")
  files = files + [(f"{info}/RECORD", ("\n".join(record) + "\n").encode())]
  with zipfile.ZipFile(path, "w") as wheel:
    for name, data in files:
      item = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
      item.compress_type = zipfile.ZIP_DEFLATED
      mode = 0o755 if name.endswith(".so") else 0o644
      item.external_attr = (0o100000 | mode) << 16
      wheel.writestr(item, data, compresslevel=9)


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--out", required=True)
  parser.add_argument("--package", required=True)
  parser.add_argument("--version", required=True)
  parser.add_argument("--tag", required=True)
  parser.add_argument("--summary", required=True)
  parser.add_argument("--readme", required=True)
  parser.add_argument("--license", required=True)
  parser.add_argument("--license_file", action="append", required=True)
  parser.add_argument("--keywords", required=True)
  parser.add_argument("--classifier", action="append", default=[])
  parser.add_argument("--url", action="append", default=[],
                      metavar="LABEL, URL")
  parser.add_argument("--sbom", action="append", default=[])
  parser.add_argument("--requires_python", required=True)
  parser.add_argument("--requires", action="append", default=[])
  parser.add_argument("--extra", action="append", default=[],
                      metavar="EXTRA=REQUIREMENT")
  parser.add_argument("--file", action="append", default=[],
                      metavar="NAME_IN_WHEEL=PATH")
  args = parser.parse_args()

  info = f"{args.package}-{args.version}.dist-info"
  documents = []
  for folder, paths in ("licenses", args.license_file), ("sboms", args.sbom):
    for path in paths:
      with open(path, "rb") as f:
        documents.append((f"{info}/{folder}/{_name(path)}", f.read()))
  files = sorted(package_files(args).items()) + [
      (f"{info}/METADATA", metadata(args).encode()),
      (f"{info}/WHEEL", wheel_info(args).encode()),
      *documents,
      (f"{info}/top_level.txt", f"{args.package}\n".encode()),
  ]
  write(args.out, files, info)


if __name__ == "__main__":
  main()
