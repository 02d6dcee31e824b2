"""All external repositories of the build. None of them needs the network."""

load("//tools/tf_config:tf_configure.bzl", "tf_configure")

def _is_bazel_4():
    # Debian's bazel-bootstrap 4.2.3 reports no version at all.
    version = native.bazel_version
    return not version or version.split(".")[0] == "4"

def wrapopt_repositories():
    if _is_bazel_4():
        # @bazel_tools of Bazel 4 downloads these three from GitHub. tools/stubs
        # has the small parts that it uses.
        for name in ["rules_cc", "rules_java", "remote_coverage_tools"]:
            native.local_repository(
                name = name,
                path = "tools/stubs/" + name,
            )
    tf_configure(name = "local_config_tf")
