"""One Bazel test per pytest file."""

# Of a test that uses .venv-tensorflow: tools/test makes that for these alone.
NEEDS_CUDA_WHEEL = ["cuda-wheel"]

# TensorFlow imports Keras, which takes a third of its time in each process of
# each test. This names the other Keras, which is not installed.
_WITHOUT_KERAS = {"TF_USE_LEGACY_KERAS": "1"}

def pytest_test(src, name = None, main = "//tools:pytest_main.py", deps = ["//wrapopt"], data = [], args = [], with_keras = False, **kwargs):
    native.py_test(
        name = name or src[:-len(".py")],
        # A new process imports TensorFlow, which takes a slow machine long.
        timeout = "long",
        srcs = [src, main],
        main = main,
        args = ["$(rootpath %s)" % src] + args,
        # The list of installed packages: a changed venv runs the tests anew.
        data = data + ["@local_config_tf//:environment.txt"],
        deps = deps + [":support"],
        env = {} if with_keras else _WITHOUT_KERAS,
        **kwargs
    )

def gpu_pytest_test(name, src, data = [], args = [], **kwargs):
    """The same with variables on a GPU, or on a fake one where there is none."""
    pytest_test(
        name = name,
        src = src,
        main = "//tests/fake_gpu:pytest_main.py",
        args = args + ["--device=GPU:0"],
        data = data + [
            "//tests/fake_gpu",
            "//tools:pytest_main.py",
        ],
        tags = NEEDS_CUDA_WHEEL,
        **kwargs
    )
