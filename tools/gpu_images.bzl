"""The GPU kernels, compiled for each architecture, as a library to link."""

load("@local_config_tf//:config.bzl", "NVRTC_VERSION", "PYTHON")

def _gpu_images_impl(ctx):
    images = []
    for name in ctx.attr.names:
        image = ctx.actions.declare_file(
            "{}/{}.image".format(ctx.label.name, name),
        )
        architecture, kind = name.split("-")
        args = ctx.actions.args()
        args.add(ctx.file._compiler)
        args.add("compile")

        # Also part of the action's key, so that another version recompiles.
        args.add("--nvrtc", NVRTC_VERSION)
        args.add("--architecture", architecture)
        args.add("--kind", kind)
        args.add("--include", ".")
        args.add("--include", ctx.file.src.dirname + "/nvrtc")
        args.add("--out", image)
        args.add(ctx.file.src)
        ctx.actions.run(
            outputs = [image],
            inputs = [ctx.file._compiler, ctx.file.src] + ctx.files.hdrs,
            executable = PYTHON,
            arguments = [args],
            mnemonic = "Nvrtc",
            progress_message = "Compiling GPU kernels for " + name,
        )
        images.append((name, image))

    data = ctx.actions.declare_file("images.bin")
    table = ctx.actions.declare_file("images.inc")
    assembly = ctx.actions.declare_file("images.S")
    args = ctx.actions.args()
    args.add(ctx.file._compiler)
    args.add("collect")
    for name, image in images:
        args.add("--image", image, format = name + "=%s")
    args.add("--data", data)
    args.add("--table", table)
    args.add("--assembly", assembly)
    ctx.actions.run(
        outputs = [data, table, assembly],
        inputs = [ctx.file._compiler] + [image for _, image in images],
        executable = PYTHON,
        arguments = [args],
        mnemonic = "GpuImages",
    )
    return [
        DefaultInfo(files = depset([data, table, assembly])),
        OutputGroupInfo(assembly = [assembly], data = [data], table = [table]),
    ]

gpu_images = rule(
    implementation = _gpu_images_impl,
    attrs = {
        "hdrs": attr.label_list(allow_files = True),
        "names": attr.string_list(
            doc = "sm_90-small: machine code for an architecture, of a Kind " +
                  "in images.h. compute_90-small: PTX.",
            mandatory = True,
        ),
        "src": attr.label(allow_single_file = True, mandatory = True),
        "_compiler": attr.label(
            allow_single_file = True,
            default = "//tools:gpu_images.py",
        ),
    },
)
