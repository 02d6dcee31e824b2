"""One Bazel test per pytest file."""

# The tag of a test that uses .venv-tensorflow, which tools/test makes if
# needed.
NEEDS_CUDA_WHEEL = ["cuda-wheel"]

# The tag of a test that only `./tools/test --nightly` runs; //... excludes it.
_NIGHTLY = ["manual", "nightly"]

def pytest_room(
        args = {},
        data = {},
        deps = {},
        exclude = [],
        nightly = {},
        shards = 1,
        tags = {},
        timeouts = {},
        with_examples = []):
    """The tests of a folder, and its other modules as `helpers` of them.

    By day, all files run in day_test, or in day_with_examples_test: one process
    imports TensorFlow, and forks a child for each file. The target of a file,
    and that of its night, has it alone.

    Args:
      args, data, deps, timeouts: what some files have, by file.
      exclude: files that have targets of their own.
      nightly: what runs only with `./tools/test --nightly`, beside parts of
        grids, because it takes long and is rarely red: {file: as of
        pytest_test}.
      shards: how many targets' worth of time day_test takes.
      tags: the same, of files that run by day in their own targets.
      with_examples: those that need the packages of the examples, which are
        hidden from all others.
    """
    native.py_library(
        name = "helpers",
        testonly = True,
        srcs = native.glob(
            ["*.py"],
            exclude = ["*_test.py"],
            allow_empty = True,
        ),
        imports = ["."],
        deps = ["//tests/support"],
    )
    of_day = {True: [], False: []}
    for src in native.glob(["*_test.py"], exclude = exclude):
        if src not in tags and nightly.get(src) != "all":
            of_day[src in with_examples].append(src)
        pytest_test(
            src = src,
            args = args.get(src, []),
            data = data.get(src, []),
            nightly = nightly.get(src),
            tags = tags.get(src, ["manual"]),
            timeout = timeouts.get(src, "long"),
            with_examples = src in with_examples,
            deps = [":helpers"] + deps.get(src, []),
        )
    for has_examples, srcs in of_day.items():
        if srcs:
            _pytest_test(
                name = "day_with_examples_test" if has_examples else "day_test",
                srcs = srcs,
                args = ["--cases=day"] + [
                    _at_night(src, nightly[src])
                    for src in srcs
                    if src in nightly
                ] + _of(args, srcs),
                data = depset(_of(data, srcs)).to_list(),
                shard_count = min(shards, len(srcs)),
                timeout = "eternal",
                with_examples = has_examples,
                deps = depset([":helpers"] + _of(deps, srcs)).to_list(),
            )

def _at_night(src, expression):
    return "--at_night='%s:%s'" % (src, expression)

def _of(lists, srcs):
    """The elements of some files' lists."""
    return [x for src in srcs for x in lists.get(src, [])]

def pytest_test(
        src,
        name = None,
        nightly = None,
        args = [],
        tags = [],
        **kwargs):
    """The tests of a file.

    Args:
      src: the file.
      name: the target's name, by default the file's.
      nightly: cases that run at night alone, as an expression of pytest's -k;
        "all" for all of them, "none" if nothing does. Otherwise the target has
        of the others those of the day, see cases.py, and X_nightly_test has
        what it leaves out.
      args: arguments of pytest.
      tags: as of any test.
      **kwargs: as of _pytest_test.
    """
    name = name or src[:-len(".py")]
    if nightly == "all":
        tags = tags + _NIGHTLY
    elif nightly != "none":
        if nightly:
            args = args + [_at_night(src, nightly)]
        _pytest_test(
            name = name[:-len("test")] + "nightly_test",
            srcs = [src],
            args = args + ["--cases=night"],
            tags = tags + _NIGHTLY,
            **kwargs
        )
        args = args + ["--cases=day"]
    _pytest_test(name = name, srcs = [src], args = args, tags = tags, **kwargs)

def _pytest_test(
        name,
        srcs,
        main = "//tools:pytest_main.py",
        deps = [],
        data = [],
        args = [],
        timeout = "long",
        with_examples = False,
        **kwargs):
    native.py_test(
        name = name,
        # "long": each process imports TensorFlow, which takes long on a slow
        # machine.
        timeout = timeout,
        srcs = srcs + [
            main,
            "//tools:cases.py",
        ],
        main = main,
        args = ["$(rootpath %s)" % src for src in srcs] + args,
        # The list of installed packages: a changed venv reruns the tests.
        data = data + ["@local_config_tf//:environment.txt"],
        deps = deps + [
            "//tests/support",
            "//wrapopt",
        ] + ([] if with_examples else ["//tests/hidden"]),
        **kwargs
    )

def gpu_pytest_test(name, src, data = [], args = [], tags = [], **kwargs):
    """The tests of a file with variables on a GPU, or on a fake one."""
    pytest_test(
        name = name,
        src = src,
        main = "//tests/fake_gpu:pytest_main.py",
        args = args + ["--device=GPU:0"],
        data = data + [
            "//tests/fake_gpu",
            "//tools:pytest_main.py",
        ],
        tags = NEEDS_CUDA_WHEEL + tags,
        **kwargs
    )
