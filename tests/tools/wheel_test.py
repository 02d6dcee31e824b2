"""The wheel: its tag, its metadata, its contents, and that it works."""

import base64
import email
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import zipfile

from auditwheel import wheel_abi
from cyclonedx.model.bom import Bom
from elftools.elf import elffile
from packaging import requirements
from packaging import utils
from packaging.version import Version
import pytest
import tensorflow as tf

from processes import printed_by, run_python

# They come with TensorFlow, not with the system and not with wrapopt.
TENSORFLOW_LIBRARIES = frozenset(
    {"libtensorflow_cc.so.2", "libtensorflow_framework.so.2"})

OPS = "_wrapopt_ops_" + "_".join(tf.__version__.split(".")[:2])
LIBRARIES = ["wrapopt/_wrapopt_native.so", f"wrapopt/{OPS}.so",
             "wrapopt/bench/_stream_limit.so"]
# The C functions that each exports.
EXPORTS = {
    "_wrapopt_native.so": {
        "wrapopt_add_decoded", "wrapopt_cpu_isa", "wrapopt_encode",
        "wrapopt_facts", "wrapopt_gpus", "wrapopt_step"},
    f"{OPS}.so": set(),
    "_stream_limit.so": {"wrapopt_stream_pass"},
}


@pytest.fixture(scope="module")
def wheel(request):
  return pathlib.Path(request.config.getoption("--wheel")).absolute()


@pytest.fixture(scope="module")
def info(wheel):
  """The prefix of the wheel's metadata files."""
  name, version = wheel.name.split("-")[:2]
  return f"{name}-{version}.dist-info"


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
  """A fresh folder that the wheel is installed in."""
  path = tmp_path_factory.mktemp("site")
  subprocess.run([sys.executable, "-m", "pip", "install", "--no-index",
                  "--no-deps", "--disable-pip-version-check", "-q",
                  "--target", path, wheel], check=True)
  return path


def interpreters():
  """{distribution: an interpreter that should have it}."""
  # The one beside the test's own, or the one that the user names with
  # --test_env=WRAPOPT_OTHER_PYTHON=...
  other = os.environ.get("WRAPOPT_OTHER_PYTHON") or os.path.join(
      os.path.dirname(sys.prefix), ".venv-tensorflow", "bin", "python")
  return {"the test's own": sys.executable, "the other": other}


@pytest.mark.parametrize("which", interpreters())
def test_installed_files_work(site, capsys, which):
  python = interpreters()[which]
  if not os.path.exists(python):
    pytest.skip(f"there is no {python}, an interpreter with the other one of "
                "tensorflow and tensorflow-cpu")
  # tools/wheel runs it too, with other versions of Python.
  printed = printed_by("tests/tools/wheel_smoke.py", str(site), python=python,
                       PYTHONPATH=str(site))
  with capsys.disabled():
    print(f"\nworks with {printed.strip()}")
  assert f"library      {site}/wrapopt/{OPS}.so\n" in printed_by(
      "-m", "wrapopt", python=python, PYTHONPATH=str(site))


def test_tag(wheel):
  """auditwheel allows the tag, hence pip installs it nowhere it cannot run."""
  found = wheel_abi.analyze_wheel_abi(
      None, None, wheel, TENSORFLOW_LIBRARIES, disable_isa_ext_check=False,
      allow_graft=False)
  (tag,) = utils.parse_wheel_filename(wheel.name)[3]
  wanted = found.policies.get_policy_by_name(tag.platform)
  assert tag.platform.startswith("manylinux_2_")
  assert not found.overall_policy < wanted, (
      f"the libraries need {found.overall_policy.name}: build on an older "
      "system, or name that tag in BUILD")
  # One wheel serves all versions of Python.
  assert (tag.interpreter, tag.abi) == ("py3", "none")


def test_metadata(wheel, info):
  with zipfile.ZipFile(wheel) as z:
    metadata = email.message_from_bytes(z.read(f"{info}/METADATA"))
  assert metadata["Name"] == "wrapopt"
  assert metadata["Version"] == wheel.name.split("-")[1]
  assert metadata["Requires-Python"] == ">=3.10"
  assert metadata["License-Expression"] == (
      "Apache-2.0 AND BSD-3-Clause AND MPL-2.0")
  assert metadata.get_all("License-File") == ["LICENSE", "NOTICE"]
  assert "exponential moving average" in metadata["Keywords"].split(",")
  for version in "3.10", "3.11", "3.12", "3.13":
    assert f"Programming Language :: Python :: {version}" in (
        metadata.get_all("Classifier"))
  assert metadata["Description-Content-Type"] == "text/markdown"
  urls = dict(url.split(", ") for url in metadata.get_all("Project-URL"))
  # Relative links would lead nowhere on the page of a package index.
  link = re.compile(r"(?<=\]\()[^)#]\S*(?=\))")
  with open("README.md", encoding="utf-8") as f:
    relative = link.findall(f.read())
  assert link.findall(metadata.get_payload()) == [
      f"{urls['Source']}/{'raw' if path.endswith('.png') else 'blob'}"
      f"/HEAD/{path}" for path in relative]
  assert urls.keys() == {"Homepage", "Documentation", "Source", "Issues",
                         "Changelog", "Security"}
  # The owner fills in one place.
  assert all(url.startswith(urls["Homepage"]) for url in urls.values())

  needs = [requirements.Requirement(r)
           for r in metadata.get_all("Requires-Dist")]
  # One of the two distributions of TensorFlow is there: which one is the
  # user's choice, and the other beside it would break both.
  assert [str(r) for r in needs if r.marker is None] == ["numpy"]

  def extras(machine):
    return {
        extra: {r.name: str(r.specifier) for r in needs
                if r.marker and r.marker.evaluate(
                    {"extra": extra, "platform_machine": machine})}
        for extra in metadata.get_all("Provides-Extra")}

  tensorflow = Version(tf.__version__)
  major, minor = tensorflow.release[:2]
  least = tensorflow if tensorflow.is_prerelease else f"{major}.{minor}"
  versions = f"<{major}.{minor + 1},>={least}"
  for machine, name in ("x86_64", "tensorflow-cpu"), ("aarch64", "tensorflow"):
    assert extras(machine) == {
        "checkpoints": {"h5py": "", "ml_dtypes": "", "safetensors": ">=0.5",
                        "tqdm": ""},
        "examples": {"matplotlib": ">=3.10", "scikit-learn": "", "tqdm": ""},
        "tensorflow": {"tensorflow": versions},
        "tensorflow-cpu": {name: versions},
    }


def test_holds_wrapopt_and_nothing_else(wheel, info):
  with zipfile.ZipFile(wheel) as z:
    names = z.namelist()
    assert z.testzip() is None
  assert {n for n in names if n.startswith(info)} == {
      f"{info}/{n}" for n in ["METADATA", "RECORD", "WHEEL", "licenses/LICENSE",
                              "licenses/NOTICE", f"sboms/{OPS}.cdx.json",
                              "top_level.txt"]}
  for name in "LICENSE", "NOTICE":
    with zipfile.ZipFile(wheel) as z, open(name, "rb") as f:
      assert z.read(f"{info}/licenses/{name}") == f.read()
  package = [n for n in names if not n.startswith(info)]
  assert [n for n in package if not n.endswith((".py", "/py.typed"))] == (
      [LIBRARIES[0], f"wrapopt/{OPS}.json", *LIBRARIES[1:]])
  assert "wrapopt/py.typed" in package
  assert all(n.startswith("wrapopt/") for n in package)
  assert "wrapopt/__init__.py" in package
  assert "wrapopt/BUILD" not in package


def test_sbom(wheel, info):
  """It names what NOTICE names, and what compiled the GPU kernels."""
  with zipfile.ZipFile(wheel) as z:
    text = z.read(f"{info}/sboms/{OPS}.cdx.json")
    notice = z.read(f"{info}/licenses/NOTICE").decode()
  bom = Bom.from_json(json.loads(text))
  assert (bom.metadata.component.name, bom.metadata.component.version) == (
      "wrapopt", wheel.name.split("-")[1])
  components = {c.name: c for c in bom.components}
  assert components.pop("tensorflow").version == tf.__version__
  compiler = components.pop("nvrtc", None)
  assert bool(compiler) == wheel.name.endswith("x86_64.whl")
  assert compiler is None or compiler.scope.value == "excluded"
  assert {name for name, c in components.items() if not c.version} == {
      "xla", "ml_dtypes"}
  named = re.findall("(?m)^- (.*?):", notice)
  assert named == ["TensorFlow, XLA and ml_dtypes", "Abseil", "Eigen",
                   "Protocol Buffers"]
  assert components.keys() == {"xla", "ml_dtypes", "abseil", "eigen",
                               "protobuf"}


def test_size(wheel):
  with zipfile.ZipFile(wheel) as z:
    installed = sum(item.file_size for item in z.infolist())
  assert wheel.stat().st_size < 6e6 and installed < 10e6


def test_record(wheel, info):
  with zipfile.ZipFile(wheel) as z:
    record = [line.split(",") for line in
              z.read(f"{info}/RECORD").decode().splitlines()]
    assert [row[0] for row in record] == z.namelist()
    assert record.pop() == [f"{info}/RECORD", "", ""]
    for name, digest, size in record:
      data = z.read(name)
      expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
      assert digest == "sha256=" + expected.decode().rstrip("=")
      assert int(size) == len(data)


@pytest.fixture(params=LIBRARIES)
def library(wheel, tmp_path, request):
  with zipfile.ZipFile(wheel) as z:  # pip refuses those of other platforms.
    return pathlib.Path(z.extract(request.param, tmp_path))


def test_library_exports_only_its_functions(library):
  with open(library, "rb") as f:
    elf = elffile.ELFFile(f)
    exported = {
        symbol.name
        for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
        if symbol["st_shndx"] != "SHN_UNDEF"
        and symbol["st_info"]["bind"] != "STB_LOCAL"}
    # The engine's functions, which the libraries of each TensorFlow call.
    engine = {name for name in exported if name.startswith(("_ZN7wrapopt",
                                                            "_ZNK7wrapopt"))}
    assert bool(engine) == (library.name == "_wrapopt_native.so")
    assert exported - engine == EXPORTS[library.name]
    assert elf.get_section_by_name(".symtab") is None, "not stripped"


def test_library_finds_the_others(library):
  with open(library, "rb") as f:
    tags = list(elffile.ELFFile(f).get_section_by_name(".dynamic").iter_tags())
  needed = {t.needed for t in tags if t.entry.d_tag == "DT_NEEDED"}
  runpath = [t.runpath for t in tags if t.entry.d_tag == "DT_RUNPATH"]
  tensorflow = {n for n in needed if "tensorflow" in n}
  own = {n for n in needed if "wrapopt" in n}
  if library.name == f"{OPS}.so":
    assert (tensorflow, own) == (TENSORFLOW_LIBRARIES, {"_wrapopt_native.so"})
    assert runpath == ["$ORIGIN:$ORIGIN/../tensorflow"]
  else:
    assert not tensorflow and not own and not runpath


def test_library_names_no_folder_of_the_build_machine(library):
  folders = "|".join(re.escape(f.name) for f in pathlib.Path("/").iterdir())
  paths = re.findall(rb"(?<![\w.])/(?:%s)/[ -~]*" % folders.encode(),
                     library.read_bytes())
  assert not paths


BUILD_WHEEL = ["tools/build_wheel.py", "--package=p", "--version=1",
               "--tag=py3-none-any", "--summary=s", "--requires_python=>=3",
               "--license=MIT", "--keywords=k"]


def build_wheel(tmp_path, *args):
  (tmp_path / "README").write_text("text\n")
  out = tmp_path / "out.whl"
  process = run_python(*BUILD_WHEEL, f"--out={out}",
                       f"--readme={tmp_path / 'README'}",
                       f"--license_file={tmp_path / 'README'}", *args)
  return process, out.read_bytes() if out.exists() else None


def test_order_of_the_inputs_does_not_change_a_byte(tmp_path):
  args = ["--extra=a=one", "--extra=a=two", "--extra=b=three"]
  for name in ["a.py", "b.py", "c.so"]:
    (tmp_path / name).write_text(name)
    args.append(f"--file=p/{name}={tmp_path / name}")
  one = build_wheel(tmp_path, *args)[1]
  for path in tmp_path.iterdir():
    os.utime(path, (10**9, 10**9))
    path.chmod(0o600)
  other = build_wheel(tmp_path, *reversed(args))[1]
  assert one and one == other


@pytest.mark.parametrize("names, error", [
    (["other/a.py"], "other/a.py must lie in p/"),
    (["p/a.py", "p/a.py"], "p/a.py was given twice"),
])
def test_files_that_a_wheel_must_not_hold(tmp_path, names, error):
  source = tmp_path / "README"
  process, out = build_wheel(tmp_path, *[f"--file={n}={source}" for n in names])
  assert process.returncode != 0 and error in process.stderr
  assert out is None


def test_wheels_for_several_tensorflows_are_merged(tmp_path):
  """Into one with all libraries, for the range of all versions."""
  wheels = []
  for minor in 20, 21:
    folder = tmp_path / str(minor)
    folder.mkdir()
    for name in f"o_{minor}.so", "a.py":
      (folder / name).write_text(name)
    build_wheel(folder, f"--extra=tf=tensorflow>=2.{minor},<2.{minor + 1}; "
                "platform_machine == 'x'", "--requires=numpy",
                f"--file=p/o_{minor}.so={folder / f'o_{minor}.so'}",
                f"--file=p/a.py={folder / 'a.py'}")
    wheels.append(folder / "out.whl")
  printed_by("tools/merge_wheels.py", str(tmp_path / "all"),
             *map(str, wheels), pythonpath=["tools"])
  with zipfile.ZipFile(tmp_path / "all" / "out.whl") as z:
    assert {"p/a.py", "p/o_20.so", "p/o_21.so"} < set(z.namelist())
    text = z.read("p-1.dist-info/METADATA").decode()
  assert [str(requirements.Requirement(r)) for r in
          email.message_from_string(text).get_all("Requires-Dist")] == [
              "numpy", 'tensorflow<2.22,>=2.20; platform_machine == "x" and '
              'extra == "tf"']

  (tmp_path / "21" / "a.py").write_text("another")
  build_wheel(tmp_path / "21", f"--file=p/a.py={tmp_path / '21' / 'a.py'}")
  process = run_python("tools/merge_wheels.py", str(tmp_path / "all"),
                       *map(str, wheels), pythonpath=["tools"])
  assert process.returncode != 0 and "is not reproducible" in process.stderr
