"""One Bazel test per pytest file."""

def pytest_test(src, deps = ["//wrapopt"], data = [], args = [], **kwargs):
    native.py_test(
        name = src[:-len(".py")],
        # A new process imports TensorFlow, which takes a slow machine long.
        timeout = "long",
        srcs = [src, "//tools:pytest_main.py"],
        main = "//tools:pytest_main.py",
        args = ["$(rootpath %s)" % src] + args,
        # The list of installed packages: a changed venv runs the tests anew.
        data = data + ["@local_config_tf//:environment.txt"],
        deps = deps + [":support"],
        **kwargs
    )
