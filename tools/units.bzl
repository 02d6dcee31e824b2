"""Sources that are compiled several at a time.

A source that includes TensorFlow's headers takes seconds to compile, most of
them for the headers. Sources that are compiled together read the headers once.
"""

def _units_impl(ctx):
    units = []
    count = min(ctx.attr.count, len(ctx.files.srcs))
    for i in range(count):
        unit = ctx.actions.declare_file("{}_{}.cc".format(ctx.label.name, i))
        ctx.actions.write(unit, "".join([
            "#include \"{}\"\n".format(src.short_path)
            for src in ctx.files.srcs[i::count]
        ]))
        units.append(unit)
    return DefaultInfo(files = depset(units))

_units = rule(
    implementation = _units_impl,
    attrs = {
        "count": attr.int(mandatory = True),
        "srcs": attr.label_list(allow_files = [".cc"], mandatory = True),
    },
)

def cc_units_library(name, srcs, count, textual_hdrs = [], **kwargs):
    """A cc_library whose sources are compiled in `count` units.

    All sources of a unit are one file to the compiler: what one of them has in
    its anonymous namespace, no other may have.
    """
    _units(
        name = name + "_unit",
        srcs = srcs,
        count = count,
    )
    native.cc_library(
        name = name,
        srcs = [":{}_unit".format(name)],
        textual_hdrs = textual_hdrs + srcs,
        **kwargs
    )
