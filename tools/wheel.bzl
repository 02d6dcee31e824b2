"""The wheel, as a build target."""

load("@local_config_tf//:config.bzl", "PYTHON")

def _wheel_impl(ctx):
    out = ctx.actions.declare_file("{}-{}-{}.whl".format(
        ctx.attr.package,
        ctx.attr.version,
        ctx.attr.tag,
    ))
    args = ctx.actions.args()
    args.add(ctx.file._builder)
    args.add("--out", out)
    args.add("--package", ctx.attr.package)
    args.add("--version", ctx.attr.version)
    args.add("--tag", ctx.attr.tag)
    args.add("--summary", ctx.attr.summary)
    args.add("--readme", ctx.file.readme)
    args.add("--license", ctx.attr.license)
    args.add_all(ctx.files.license_files, before_each = "--license_file")
    args.add_joined("--keywords", ctx.attr.keywords, join_with = ",")
    args.add_all(ctx.attr.classifiers, before_each = "--classifier")
    args.add("--requires_python", ctx.attr.requires_python)
    args.add_all(ctx.attr.requires, before_each = "--requires")
    for label, url in ctx.attr.urls.items():
        args.add("--url", label + ", " + url)
    args.add_all(ctx.files.sboms, before_each = "--sbom")
    for extra, requirements in ctx.attr.extras.items():
        args.add_all(
            requirements,
            before_each = "--extra",
            format_each = extra + "=%s",
        )
    for f in ctx.files.srcs:
        args.add("--file", f, format = f.short_path + "=%s")
    ctx.actions.run(
        outputs = [out],
        inputs = ctx.files.srcs + ctx.files.license_files + ctx.files.sboms + [
            ctx.file.readme,
            ctx.file._builder,
        ],
        # Not a py_binary: its launcher starts with `/usr/bin/env python3`,
        # which an action without $PATH may not find.
        executable = PYTHON,
        arguments = [args],
        mnemonic = "Wheel",
    )

    # Also as runfiles: Bazel 4 passes only these of its `data` to a test.
    return [DefaultInfo(
        files = depset([out]),
        runfiles = ctx.runfiles(files = [out]),
    )]

wheel = rule(
    implementation = _wheel_impl,
    attrs = {
        "classifiers": attr.string_list(),
        "extras": attr.string_list_dict(doc = "Requirements by extra."),
        "keywords": attr.string_list(),
        "license": attr.string(doc = "As SPDX writes it.", mandatory = True),
        "license_files": attr.label_list(allow_files = True, mandatory = True),
        "package": attr.string(mandatory = True),
        "readme": attr.label(allow_single_file = True, mandatory = True),
        "requires": attr.string_list(),
        "requires_python": attr.string(mandatory = True),
        "sboms": attr.label_list(allow_files = True),
        "srcs": attr.label_list(allow_files = True, mandatory = True),
        "summary": attr.string(mandatory = True),
        "tag": attr.string(mandatory = True),
        "urls": attr.string_dict(doc = "Project-URLs by their labels."),
        "version": attr.string(mandatory = True),
        "_builder": attr.label(
            allow_single_file = True,
            default = "//tools:build_wheel.py",
        ),
    },
)
