"""Makes the packages in .venv-programs importable, after those of .venv."""

import pathlib
import sys

_VENV = pathlib.Path(sys.prefix).parent / ".venv-programs"
_PACKAGES = _VENV.joinpath(
    "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}",
    "site-packages")

assert _PACKAGES.exists(), (
    f"there is no {_PACKAGES}: ./tools/test --nightly makes it")
# At the end: TensorFlow, Keras and NumPy are those of .venv.
sys.path.append(str(_PACKAGES))
