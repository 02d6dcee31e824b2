"""Ways to break wrapopt, and the daily tests that must notice each of them.

`tools/mutants` makes these changes, one at a time, in a copy of the sources.
They are those that `tools/mutants --bulk` does not make: in other folders, in
locks, which only sanitizers see, and in what a cluster runs.
"""

import typing


class Mutant(typing.NamedTuple):
  """A change that a test must notice.

  Attributes:
    name: What is wrong then.
    file: The path of a source.
    before: Text in it, wherever it is.
    after: What replaces it.
    tests: Arguments of tools/test: the targets that notice it, and options.
  """
  name: str
  file: str
  before: str
  after: str
  tests: str


_ASAN = "//tests/cc/... --config=asan --build_tests_only"
_TSAN = "//tests/cc/... --config=tsan --build_tests_only"


def _mutants():
  """Makes the list: a generator of Mutants."""
  m = Mutant

  # Libraries and averages.
  yield m("the first library is loaded, for any TensorFlow",
          "wrapopt/sysconfig.py", "if version and _minor(version) == "
          '_minor(build["tensorflow"]):', "if version:",
          "//tests/tools:loader_test")
  yield m("an image for a GPU is taken, though its end is missing",
          "cc/gpu/images.cc",
          'if (result == 0 && out_at == image.bytes) return "";',
          'return "";', "//tests/cc:launcher_test")
  yield m("wheels that differ are merged", "tools/merge_wheels.py",
          "if files.setdefault(name, data) != data:",
          "if files.setdefault(name, data) is None:",
          "//tests/tools:wheel_test")
  yield m("averages: those of two decays change places",
          "cc/kernels/averages.cc",
          "variables->data(shadows + k * this->values() + i)",
          "variables->data(shadows + (per_value() - 1 - k) * this->values() + "
          "i)", "//tests/ops:ema_update_test")
  yield m("averages: a step between updates copies them",
          "cc/kernels/averages.cc",
          "variables->Leave(shadows + k * values() + i);", "",
          "//tests/both:update_every_test")
  yield m("mean: only the last source counts",
          "cc/kernels/averaging_assign.cc", "s == 0 ? 1.0 : 0.0", "1.0",
          "//tests/ops:averaging_assign_test")
  yield m("packed: variables overlap", "cc/kernels/packed.cc",
          "offset += size;", "offset += size / 2;", "//tests/ops:packed_test")

  # Rows.
  yield m("rows: gradients behind the last one are prefetched",
          "cc/engine/elementwise.cc", "if (i + kAhead < count) {",
          "if (i + kAhead <= count) {", _ASAN)
  yield m("lazy rows: not marked as up to date",
          "cc/engine/elementwise.cc",
          "std::exchange(log_decays[row[r]], mark)", "log_decays[row[r]]",
          "//tests/ops:lazy_averages_test")
  yield m("lazy rows: a replaced table is not noticed",
          "cc/kernels/averages.cc", "if (!average.IsValueReplaced()) continue;",
          "continue;",
          "//tests/ops:lazy_averages_test //tests/both:stale_rows_test")

  # Variables: locks, copies, checks.
  yield m("variables: writers take shared locks", "cc/kernels/variables.cc",
          "if (entries_[i].access == Access::kWrite) {\n"
          "      entries_[i].mu->lock();\n    } else {",
          "{", "//tests/ops:variables_test")
  yield m("variables: a buffer that a reader holds is written",
          "cc/kernels/variables.cc",
          "if (entry.access == Access::kWrite && !entry.is_left && "
          "IsShared(entry)) {",
          "if (false) {", "//tests/ops:ema_update_test")
  yield m("variables: one that is written may be named twice",
          "cc/kernels/variables.cc",
          "if (IsWritten(x.access)) return y.access != Access::kReadWritten;",
          "if (IsWritten(x.access)) return false;", "//tests/ops:exchange_test")
  yield m("variables: one without a value is used", "cc/kernels/variables.cc",
          "if (!entry.has_value && !entry.made_of) return NotInitialized(i);",
          "", "//tests/ops:contracts_test //tests/keras:in_place_test")
  yield m("a bundle by name: a name may be missing", "wrapopt/_bundle.py",
          '("", context.anonymous_name())', "()", "//tests/ops:bundle_test")
  yield m("a bundle by name: made in a branch", "wrapopt/_bundle.py",
          "tf.control_dependencies(None), tf.device(None), tf.device(device)",
          "tf.device(None), tf.device(device)", "//tests/ops:bundle_test")
  yield m("a bundle by name: placed apart from its variables",
          "wrapopt/_bundle.py",
          'bundle.op._set_attr("_class", places)', "pass",
          "//tests/ops:bundle_test")
  yield m("a bundle by name: dtypes are not counted",
          "cc/kernels/bundle.cc", "dtypes.size() == n && ", "",
          "//tests/ops:bundle_test")
  yield m("variables: a handle too many is passed over",
          "cc/ops/contracts.cc", "if (got == expected) return",
          "if (got >= expected) return", "//tests/ops:ema_update_test")
  yield m("variables: the first handle is used for ever",
          "cc/kernels/variables.cc",
          "return &handle(entry) == cached.handle ? &cached : nullptr;",
          "return cached.handle != nullptr ? &cached : nullptr;",
          "//tests/ops:variables_test //tests/v1:lookup_cache_test")
  yield m("exchange: a buffer in copy-on-read mode is shared",
          "cc/kernels/variables.cc",
          "if (target.var != nullptr && "
          "target.var->copy_on_read_mode.load() &&",
          "if (false &&",
          "//tests/ops:contracts_test //tests/ops:variables_test")
  yield m("move: the average keeps its value", "cc/kernels/variables.cc",
          "*source.tensor = Tensor(tensorflow::DT_INVALID);\n"
          "    source.var->is_initialized = false;", "",
          "//tests/keras:in_place_test")
  yield m("apply: a step that is not accepted is taken",
          "cc/kernels/apply.cc", "if (!accept) return;",
          "", "//tests/ops:apply_test --test_filter=accept")
  yield m("check: does nothing", "cc/kernels/move.cc",
          "&first));\n  TF_RETURN_IF_ERROR(variables.Lock());\n  return",
          "&first));\n  return",
          "//tests/keras:in_place_test")

  # XLA.
  yield m("XLA: an exchange copies one way", "cc/xla/exchange.cc",
          "variables.Assign(b + i, variables.value(a + i))",
          "variables.Assign(b + i, variables.value(b + i))",
          "//tests/ops:exchange_test")
  yield m("XLA: variables without a value are not refused",
          "cc/xla/move.cc",
          'OP_REQUIRES_OK(ctx, variables.Find("variables", Access::kRead, '
          "&first));", "static_cast<void>(first);",
          "//tests/keras:in_place_test")
  yield m("XLA: rows of a step that is not accepted count",
          "cc/xla/apply.cc", "rows->Keep(*in.accept);", ";",
          "//tests/ops:xla_test")

  # The gate and the rounds.
  yield m("gate: admits without its lock", "cc/protocols/gate.h",
          "std::lock_guard<std::mutex> lock(mu_);\n    NoteStep(step);",
          "NoteStep(step);", _TSAN)
  yield m("step lock: a step that is destroyed keeps it",
          "cc/kernels/step_lock.cc", "override { Release(); }", "override {}",
          "//tests/ops:step_lock_test")
  yield m("rounds: an arrival takes no lock", "cc/protocols/rounds.h",
          "Deferred after(this);\n"
          "    std::lock_guard<std::mutex> lock(mu_);\n"
          "    const bool accepted =",
          "Deferred after(this);\n    const bool accepted =",
          _TSAN)
  yield m("rounds: weights are ignored", "cc/kernels/rounds_resource.cc",
          "center->weight += member.weight;", "center->weight += 1;",
          "//tests/workers:local_training_test")
  yield m("rounds: servers may be in another order",
          "wrapopt/_local/_settings.py", "list of servers = {index}",
          "list of servers = 0", "//tests/workers:local_training_test")
  yield m("codes: the server forgets what its codes lose",
          "cc/kernels/averaging_center.cc",
          "MakeOwn(ctx, n, *center, &center->errors)",
          "MakeOwn(ctx, n, *center, &(center->errors = {}))",
          "//tests/ops:averaging_rounds_test")
  yield m("codes: those of an old round are added",
          "wrapopt/_local/_member.py",
          "self.place == (place[0] - 1, place[1])", "self.place",
          "//tests/workers:local_oracle_test")
  yield m("codes: errors are taken over though values do not count",
          "wrapopt/_local/_member.py",
          "if self._counted and self._sent[0][1]", "if self._sent[0][1]",
          "//tests/workers:simulator_test")
  yield m("rounds: two workers begin one job, each a fragment",
          "wrapopt/_local/_exchanges.py", "begins = begins and all(",
          "begins = True or all(", "//tests/workers:local_fragments_test")
  yield m("rounds: workers wait in rounds of different fragments",
          "wrapopt/_local/_exchanges.py",
          "min(self.fragments, key=lambda f: f.round)",
          "self.fragments[self.round % len(self.fragments)]",
          "//tests/workers:local_fragments_test")
  yield m("rounds: steps in which values travel are forgotten",
          "wrapopt/_local/_exchanges.py", "return [steps - sent,",
          "return [steps - steps,", "//tests/workers:local_oracle_test")

  # The protocol of a step, in Python.
  yield m("gate: a step counts twice", "wrapopt/drop_stale_gradient.py",
          "increment=not taken.counted", "increment=True",
          "//tests/v1:drop_stale_gradient_test")
  for name, file, before, after in (
      ("a lock does not wait for gradients", "_gates/_step_lock",
       "lock._add_control_inputs(_arrivals(lock, made))",
       "_arrivals(lock, made)"),
      ("a tensor comes from the worker after the lock", "_gates/_step_lock",
       "op._update_input(i, here[key])", "pass"),
      ("a branch is taken after the lock", "_gates/_step_lock",
       "[*wait, made()]", "wait"),
      ("ops are not put on servers", "_gates/_step_lock", "tf1.device(place)",
       "contextlib.nullcontext()"),
      ("an op may run on a worker after the lock", "_gates/_step_lock",
       "not (_is_server(op.device) or not op.device and _is_read(op))",
       "False"),
      ("all scheduled functions have one token", "_gates/_tokens",
       "number // _BASE**k % _BASE", "0"),
      ("Adam's powers without a lock", "_v1/_steps/_step",
       "type(self._opt)._finish is _Optimizer._finish", "True"),
      ("a second try resets a count", "keras/_averages/_first_step",
       "begins = step.accept & (", "begins = ("),
      ("a second try moves averages of statistics", "keras/moving_average",
       "_decays.where_due(step.accept, decays)", "decays")):
    yield m(f"workers: {name}", f"wrapopt/{file}.py", before, after,
            "//tests/workers:coordinator_test")
  for name, file, before, after in (
      ("gradients are not summed", "keras/_steps/_rules",
       "if _replicas.share_steps():", "if False:"),
      ("gradients are not summed in v1", "_v1/_steps/_rules",
       "if not _replicas.share_steps() or step.options.get(",
       "if True or step.options.get("),
      ("all change the first one's copies", "_averages/_replicas",
       "return components_[values_util.get_current_replica_id_as_int()]",
       "return components_[0]"),
      ("one's step alone is counted", "_v1/_steps/_rules",
       "_replicas.values(step.global_step) if counts else ()",
       "_replicas.values(step.global_step)[:1] if counts else ()")):
    yield m(f"replicas: {name}", f"wrapopt/{file}.py", before, after,
            "//tests/keras:replicas_test")
  yield m("v1: a dropped gradient travels", "wrapopt/_v1/_steps/_gate.py",
          "parts = tf.cond(accept, admitted, dropped)",
          "parts = tf.cond(accept, admitted, admitted)",
          "//tests/workers:cluster_test")


MUTANTS = list(_mutants())
