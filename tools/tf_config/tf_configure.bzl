"""Repository rule: the interpreter with its TensorFlow and pybind11.

The interpreter is $PYTHON_BIN_PATH, else <workspace>/.venv/bin/python. Its
TensorFlow may be another one, in the folder $TENSORFLOW_FOLDER.
"""

# Headers of TensorFlow's dependencies that are under external/ in the wheel,
# and that XLA's headers include from their root.
_TF_EXTERNAL_INCLUDES = [
    "external/highwayhash",
    "external/farmhash_archive/src",
]

def _find_python(ctx, workspace):
    path = ctx.os.environ.get("PYTHON_BIN_PATH", "")
    if not path:
        path = "{}/.venv/bin/python".format(workspace)
    if not ctx.path(path).exists:
        fail(("{} must exist: run ./tools/quickstart, or set " +
              "PYTHON_BIN_PATH").format(path))
    return path

def _tf_configure_impl(ctx):
    workspace = ctx.path(Label("//:WORKSPACE")).dirname

    # As labels, so that a change of one reruns this rule.
    probe = ctx.path(Label("//tools/tf_config:probe.py"))
    package = ctx.path(Label("//wrapopt:version.py")).dirname
    ctx.path(Label("//wrapopt:sysconfig.py"))

    python = _find_python(ctx, workspace)
    folder = ctx.os.environ.get("TENSORFLOW_FOLDER", "")
    result = ctx.execute(
        [python, probe, package] + ([folder] if folder else []),
        environment = {"PYTHONNOUSERSITE": "1"},
    )
    if result.return_code:
        fail("tf_configure: " + result.stderr)
    found = json.decode(result.stdout)

    ctx.symlink(found["tf_include"], "include")
    for library in ["libtensorflow_framework.so.2", "libtensorflow_cc.so.2"]:
        ctx.symlink("{}/{}".format(found["tf_dir"], library), library)
    ctx.symlink(found["pybind11_include"], "pybind11_include")
    ctx.symlink(found["python_include"], "python_include")

    # An input of tests, so that a changed venv reruns them.
    ctx.file("environment.txt", "\n".join(found["packages"]) + "\n")

    ctx.file("config.bzl", "\n".join([
        "ABSL_NAMESPACE = %r" % found["absl_namespace"],
        "COMPILED_IN = %r" % found["compiled_in"],
        "CXX11_ABI = %r" % int(found["cxx11_abi"]),
        "MACHINE = %r" % found["machine"],
        "NVRTC_VERSION = %r" % found["nvrtc_version"],
        "PYTHON = %r" % found["python"],
        "TF_VERSION = %r" % found["tf_version"],
        "WRAPOPT_VERSION = %r" % found["wrapopt_version"],
        "",
    ]))
    ctx.template(
        "BUILD",
        Label("//tools/tf_config:BUILD.tpl"),
        {
            "%{CXX11_ABI}": str(int(found["cxx11_abi"])),
            "%{PYTHON}": found["python"],
            "%{TF_XLA_INCLUDES}": repr(
                ["include/" + d for d in _TF_EXTERNAL_INCLUDES],
            ),
        },
    )

tf_configure = repository_rule(
    implementation = _tf_configure_impl,
    configure = True,
    local = True,
    environ = [
        "PYTHON_BIN_PATH",
        "TENSORFLOW_FOLDER",
    ],
)
