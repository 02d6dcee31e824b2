"""Ways to break wrapopt, and the daily tests that must notice each of them.

`tools/mutants` makes these changes, one at a time, in a copy of the sources.
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

  # The mathematics of the kernels.
  yield m("Adam: epsilon inside of the root", "cc/rules/adam.h",
          "(Sqrt(v) + epsilon)", "Sqrt(v + epsilon)",
          "//tests/ops:apply_test --test_filter=Adam")
  yield m("average: moves away from the value", "cc/rules/ema.h",
          "shadow + rate * (value - shadow)",
          "shadow - rate * (value - shadow)", "//tests/ops:ema_update_test")
  yield m("Schedule-Free: y takes the whole step of z",
          "cc/rules/schedule_free.h", "push * (stepped - z)", "(stepped - z)",
          "//tests/ops:apply_test --test_filter=ScheduleFree")
  yield m("Schedule-Free: the decay at y is that at z",
          "cc/rules/schedule_free.h", "lr * weight_decay_at_y * var",
          "lr * weight_decay_at_y * z",
          "//tests/ops:apply_test --test_filter=ScheduleFree")
  yield m("Schedule-Free: the weight is of the rate of now",
          "wrapopt/_averages/_interpolated.py",
          "largest**self.weight_lr_power", "rate**self.weight_lr_power",
          "//tests/both:interpolated_test")
  yield m("Schedule-Free: after fit, x is taken for y",
          "wrapopt/_averages/_interpolated.py", "1 - of_x / share",
          "1 - of_x / momentum", "//tests/keras:interpolated_test")
  yield m("Schedule-Free: x is y", "wrapopt/_averages/_interpolated.py",
          "return _towards(y, z, 1 - 1 / share)", "return y",
          "//tests/keras:interpolated_test")
  yield m("Schedule-Free: momentum acts twice in two passes",
          "wrapopt/keras/_interpolated.py",
          '"beta_1": property(lambda _: 0.0)', '"_": None',
          "//tests/both:interpolated_test")
  yield m("primal average: Adam loses its first moment",
          "wrapopt/_averages/_interpolated.py", "    return False\n",
          "    return True\n", "//tests/both:interpolated_test")
  yield m("BEMA: against the way that the weights went",
          "wrapopt/_averages/_bias_corrected.py", "alpha * (v - v_0)",
          "alpha * (v_0 - v)", "//tests/both:bema_test")
  yield m("BEMA: t counts updates, not steps", "wrapopt/_averages/_decays.py",
          "t * every if decay.counts_steps else t", "t",
          "//tests/both:bema_test")
  yield m("BEMA: after fit, it follows from the averaged weights",
          "wrapopt/keras/_averaging.py", "      part.hold(value)",
          "      pass", "//tests/both:bema_test")
  yield m("BEMA: a file in place has its own s",
          "wrapopt/keras/_averaging.py",
          "s.value_in_block(swapped_in), s.variable", "*s.saved",
          "//tests/both:bema_test")
  yield m("BEMA: it is read while another average is in place",
          "wrapopt/keras/_averaging.py",
          "self._all_corrected(but=self.index_of(decay)), saved",
          "(), saved", "//tests/both:bema_test")
  yield m("files: an average goes to a variable of another value",
          "wrapopt/keras/_owners.py",
          "return a.dtype != b.dtype or not is_known(key)", "return True",
          "//tests/keras:saving_test --test_filter=one_tower")
  yield m("files: an average stays with the number of its variable",
          "wrapopt/keras/_owners.py",
          "and is_like(a.path, b.path))\n  # Of", "and False)\n  # Of",
          "//tests/keras:saving_test --test_filter=built_again")
  yield m("files: averages of LoRA's factors are loaded",
          "wrapopt/keras/_state.py",
          "if i in found and not _latest.is_merged(pair[1]):", "if i in found:",
          "//tests/keras:saving_test --test_filter=factors")
  yield m("files: an eager step drops averages of statistics",
          "wrapopt/keras/_statistics.py",
          "self._optimizer._store.state.keep_statistics()", "pass",
          "//tests/keras:batch_norm_test --test_filter=where_their")
  yield m("state trees: what they set is seeded again",
          "wrapopt/keras/_state.py",
          "self._is_loaded, self._noted = True, None\n"
          "      self.set_averages.add(id(variable))", "pass",
          "//tests/keras:saving_test --test_filter=tree")
  yield m("Schedule-Free: a variable that holds x stays there",
          "wrapopt/_averages/_interpolated.py",
          "tf.where(moves, _towards(y, z.read_value(), by), y)", "y",
          "//tests/keras:interpolated_test --test_filter=without_gradient")
  yield m("decay of merges: factors in the opposite order",
          "wrapopt/checkpoints/_rate_decay.py",
          "factors = [1.0, *(of_updates / np.diff(s)), 0.0]",
          "factors = [1.0, *(of_updates / np.diff(s))[::-1], 0.0]",
          "//tests/checkpoints:rate_decay_test")
  yield m("compensation: away from the weights of the gradient",
          "wrapopt/_gates/_compensation.py", "before - _computed(origin)",
          "_computed(origin) - before", "//tests/v1:delay_policies_test")
  yield m("gap-aware: the first step is averaged with zero",
          "wrapopt/_gates/_compensation.py",
          "tf.equal(size, 0), distance,", "tf.equal(size, -1), distance,",
          "//tests/v1:delay_policies_test")
  yield m("compensation: the last of a row's origins counts",
          "wrapopt/_gates/_compensation.py", "unsorted_segment_min",
          "unsorted_segment_max", "//tests/v1:delay_policies_test")
  yield m("compensation: in Keras a step comes between it and its own",
          "wrapopt/keras/_inner.py",
          "is_one_op and admitted.compensation is None", "is_one_op",
          "//tests/keras:gate_test")
  yield m("restore: after a read, a step does not know of it",
          "wrapopt/keras/_state.py", "_latest.restored(self) != self._noticed",
          "_latest.restored(self) != self._completed",
          "//tests/keras:saving_test")
  yield m("compensation: the weights of now are those of the gradient",
          "wrapopt/_gates/_origins.py",
          "origins[id(v)] = _rows(values[0].outputs[0], g, v)",
          "origins[id(v)] = _rows(v.read_value(), g, v)",
          "//tests/v1:delay_policies_test")
  yield m("loop: the last element of a group is left out",
          "cc/engine/elementwise.cc",
          "for (size_t j = from; j < to; ++j)",
          "for (size_t j = from; j + 1 < to; ++j)",
          "//tests/ops:ema_update_test")
  yield m("loop: the tail of a block is left out",
          "cc/engine/elementwise.cc",
          "const size_t to = std::min(from + kBlock, variable->elements);",
          "const size_t to = std::min(from + kBlock, variable->elements / "
          "kGroup * kGroup);", "//tests/ops:ema_update_test")
  yield m("subnormal numbers are not flushed", "cc/engine/subnormals.h",
          "Set(before_ | kFlush)", "Set(before_)",
          # Not by the ops' tests: TensorFlow flushes in all of its threads.
          "//tests/cc:rules_test")
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
  yield m("averages: a step between updates runs them",
          "cc/engine/elementwise.h",
          "return step.rule == RuleId::kEma && *scalars == 0;",
          "return false;", "//tests/cc:threads_test")
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
  yield m("rows: an index at the end of the table is accepted",
          "cc/engine/sparse_rows.cc", "row >= rows", "row > rows",
          "//tests/ops:apply_test --test_filter=indices")
  yield m("rows: not sorted by their last bit", "cc/engine/sparse_rows.cc",
          "& (digits - 1);", "& (digits - 2);",
          "//tests/ops:apply_test //tests/ops:lazy_averages_test")
  yield m("rows: sums do not start at zero", "cc/engine/elementwise.cc",
          "std::memset(to, 0, elements * sizeof(Sum));", "",
          "//tests/ops:apply_test")
  yield m("rows: gradients behind the last one are prefetched",
          "cc/engine/elementwise.cc", "if (i + kAhead < count) {",
          "if (i + kAhead <= count) {", _ASAN)
  yield m("lazy rows: no catch-up before a step", "cc/engine/row_step.cc",
          "average.CatchUp(group);", "", "//tests/ops:lazy_averages_test")
  yield m("lazy rows: not marked as up to date",
          "cc/engine/elementwise.cc",
          "std::exchange(log_decays[row[r]], mark)", "log_decays[row[r]]",
          "//tests/ops:lazy_averages_test")
  yield m("lazy rows: a step counts twice", "cc/engine/lazy_average.cc",
          "all_steps() += log_decay;", "all_steps() += 2 * log_decay;",
          "//tests/ops:lazy_averages_test")
  yield m("lazy rows: sums are not rebased", "cc/engine/lazy_average.cc",
          "if (!CatchUp::MustRebase(all_steps())) return;", "return;",
          "//tests/ops:lazy_averages_test //tests/both:stale_rows_test")
  yield m("lazy rows: the sum is kept after a catch-up",
          "cc/engine/lazy_average.cc", "all_steps() = step_value() = 0;",
          "step_value() = 0;", "//tests/ops:lazy_averages_test")
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
          "//tests/ops:xla_test")
  yield m("XLA: variables without a value are not refused",
          "cc/xla/move.cc",
          'OP_REQUIRES_OK(ctx, variables.Find("variables", Access::kRead, '
          "&first));", "static_cast<void>(first);",
          "//tests/keras:in_place_test")
  yield m("XLA: rows of a step that is not accepted count",
          "cc/xla/apply.cc", "rows->Keep(*in.accept);", ";",
          "//tests/ops:xla_test")

  # The gate and the rounds.
  yield m("gate: the limit itself is dropped", "cc/protocols/gate.h",
          "*staleness > limit", "*staleness >= limit",
          "//tests/ops:staleness_gate_test")
  yield m("gate: updates in flight do not count", "cc/protocols/gate.h",
          "std::clamp(admitted_, done, SaturatedSum(done, in_flight_))",
          "std::clamp(admitted_, done, done)",
          "//tests/ops:staleness_gate_test")
  yield m("gate: an update that was cut off does not count",
          "cc/protocols/gate.h", "++aborted_;", "",
          "//tests/ops:staleness_gate_test")
  yield m("gate: admits without its lock", "cc/protocols/gate.h",
          "std::lock_guard<std::mutex> lock(mu_);\n    NoteStep(step);",
          "NoteStep(step);", _TSAN)
  yield m("step lock: one who gives up frees it", "cc/protocols/step_lock.h",
          "waiting_.erase(found);", "waiting_.erase(found); is_held_ = false;",
          "//tests/ops:step_lock_test")
  yield m("step lock: a step that is destroyed keeps it",
          "cc/kernels/step_lock.cc", "override { Release(); }", "override {}",
          "//tests/ops:step_lock_test")
  yield m("rounds: a late worker arrives", "cc/protocols/rounds.h",
          "accepted = told.place == place() && !closed_ &&",
          "accepted = told.place == place() &&",
          "//tests/cc:rounds_test")
  yield m("rounds: an arrival takes no lock", "cc/protocols/rounds.h",
          "Deferred after(this);\n"
          "    std::lock_guard<std::mutex> lock(mu_);\n"
          "    const bool accepted =",
          "Deferred after(this);\n    const bool accepted =",
          _TSAN)
  yield m("rounds: the members of servers may differ", "cc/protocols/rounds.h",
          "if (known.closed && known.workers == Workers())",
          "if (known.closed)", "//tests/cc:rounds_test")
  yield m("rounds: weights are ignored", "cc/kernels/rounds_resource.cc",
          "center->weight += member.weight;", "center->weight += 1;",
          "//tests/workers:local_training_test")
  yield m("rounds: a worker may write while the chief restores",
          "cc/protocols/rounds.h", "open_ < 0 && generation_ > 0", "false",
          "//tests/cc:rounds_test")
  yield m("rounds: a worker that enters again keeps its turn",
          "cc/protocols/rounds.h",
          "ForgetTurns(wait.worker, after);\n    return known;",
          "return known;", "//tests/cc:rounds_test")
  yield m("rounds: one that has left is waited for", "cc/protocols/rounds.h",
          "members_.size() + absent()", "members_.size()",
          "//tests/cc:rounds_test")
  yield m("rounds: all workers read at once", "cc/protocols/rounds.h",
          "kMostReaders = 4", "kMostReaders = 4000",
          "//tests/ops:averaging_rounds_test")
  yield m("rounds: no round waits for a worker that reads",
          "cc/protocols/rounds.h",
          "if (!wait.worker.empty()) expected_.Add(wait.worker);\n      return",
          "return", "//tests/cc:rounds_test")
  yield m("rounds: a round waits for a reader that is no worker",
          "cc/protocols/rounds.h", "if (!wait.worker.empty()) expected_",
          "expected_", "//tests/cc:rounds_test")
  yield m("rounds: a second job goes on from the center of the first",
          "cc/protocols/rounds.h", "if (!resumes && processes_.IsTaken(",
          "if (false && (", "//tests/cc:rounds_test")
  yield m("rounds: servers may be in another order",
          "wrapopt/_local/_settings.py", "list of servers = {index}",
          "list of servers = 0", "//tests/workers:local_training_test")
  yield m("rounds: variables may have other shapes",
          "wrapopt/_local/_settings.py",
          "{json.dumps(self.shape)}, {self._role}", "{self._role}",
          "//tests/workers:local_training_test")
  yield m("rounds: jobs of one name are not told apart",
          "wrapopt/_local/_server.py",
          "is_other = holds and", "is_other = False and",
          "//tests/workers:local_training_test")
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
  yield m("rounds: weights that a callback has restored are sent",
          "wrapopt/keras/local_rounds.py",
          "if changed or not", "if not", "//tests/keras:local_rounds_test")

  # Files.
  yield m("merge: bfloat16 is rounded twice", "wrapopt/checkpoints/_merge.py",
          "bits |= wide != value", "pass",
          "//tests/checkpoints:checkpoints_test")
  yield m("merge: an optimizer with a schedule is not recognized",
          "wrapopt/checkpoints/_tensorflow.py",
          '{"_iterations", "_variables"}, ', "",
          "//tests/checkpoints:checkpoints_test")
  yield m("merge: the weights that only an optimizer refers to are its state",
          "wrapopt/checkpoints/_tensorflow.py", "{0, *trained}", "{0}",
          "//tests/checkpoints:checkpoints_test")
  yield m("merge: an optimizer of a part is not recognized",
          "wrapopt/checkpoints/_h5.py", '        found.append(group + "/")',
          "        pass", "//tests/checkpoints:checkpoints_test")
  yield m("merge: a layer that counts is an optimizer",
          "wrapopt/checkpoints/_h5.py",
          "if any(_OPTIMIZER.search(str(word)) for word in names):", "if True:",
          "//tests/checkpoints:checkpoints_test")
  yield m("merge: a checkpoint of TensorFlow loses its second data file",
          "wrapopt/checkpoints/_tensorflow.py",
          "checkpoint_prefixes=self._parts,",
          "checkpoint_prefixes=self._parts[:1],",
          "//tests/checkpoints:checkpoints_test")
  yield m("snapshots: data files of an older one stay",
          "wrapopt/checkpoints/_tensorflow.py",
          "for file in _files_of(self.path):",
          "for file in _files_of(self.path)[:1]:",
          "//tests/checkpoints:snapshots_test")

  # The protocol of a step, in Python.
  yield m("settle: rows that lag behind stay so", "wrapopt/ops/_lagging.py",
          "        caught_up = average.catch_up()",
          "        caught_up = None", "//tests/both:stale_rows_test")
  yield m("settle: an average that a graph does not know becomes lazy",
          "wrapopt/ops/_lagging.py", "        average.keep_dense()",
          "        pass", "//tests/both:stale_rows_test")
  yield m("Keras: rows lag behind although a wrapper changes all",
          "wrapopt/keras/_inner.py",
          "rows_stay=not any(f.changes_weights for f in others)",
          "rows_stay=True", "//tests/keras:lazy_test")
  yield m("Keras: duplicates are always summed", "wrapopt/keras/_inner.py",
          "self._sums = any(f.sum_duplicates for f in wrappers)",
          "self._sums = True", "//tests/keras:lazy_test")
  yield m("Keras: averages that have begun begin again",
          "wrapopt/keras/_store.py", "self._begun.value.assign(1)", "pass",
          "//tests/keras:conformance_test")
  yield m("Keras: an average that a file lacks keeps its value",
          "wrapopt/keras/_assign.py",
          "  else:\n    seed(average, variable)", "",
          "//tests/keras:saving_test")
  yield m("Keras: a file that is loaded before the build is dropped",
          "wrapopt/keras/_state.py", "      self.load_own_variables(late)",
          "      pass", "//tests/keras:saving_test")
  yield m("Keras: what a checkpoint lacks replaces a later file's values",
          "wrapopt/keras/_state.py",
          "self._before_late = self._completed =", "self._before_late =",
          "//tests/keras:saving_test")
  yield m("Keras: callbacks after swap_on_epoch see raw weights",
          "wrapopt/keras/_callback_after.py",
          "        found.callbacks[k] = cls(callback, evaluator)",
          "        pass", "//tests/keras:evaluate_test")
  yield m("Keras: fit ends with the raw weights of a GAN's generator",
          "wrapopt/keras/evaluate_with_averages.py",
          "        optimizer.finalize_variable_values(",
          "        str(", "//tests/keras:two_optimizers_test")
  yield m("SWA: the mean counts its start", "wrapopt/keras/swa.py",
          "n / (n + 1))", "(n + 1) / (n + 2))",
          "//tests/keras:conformance_test")
  yield m("Lookahead: one step early", "wrapopt/keras/lookahead.py",
          "(step.iterations + 1) % self._sync_period",
          "step.iterations % self._sync_period",
          "//tests/keras:conformance_test")
  yield m("some variables: a step that fails changes the others",
          "wrapopt/ops/_apply.py", "          if group.follows else",
          "          if False else", "//tests/v1:some_variables_test")
  yield m("some variables: an average is that of another variable",
          "wrapopt/keras/_state.py", "    self.rows[name][i] =",
          "    self.rows[name][len(self.rows[name])] =",
          "//tests/keras:some_variables_test")
  yield m("every n-th step: one step late", "wrapopt/_averages/_decays.py",
          "tf.equal((steps + 1) % every, 0)", "tf.equal(steps % every, 0)",
          "//tests/both:update_every_test //tests/both:averages_test")
  yield m("warm-up: one step late", "wrapopt/_averages/_decays.py",
          "(1 + n) / (10 + n)", "n / (9 + n)", "//tests/v1:moving_average_test")
  yield m("decays: always the first", "wrapopt/_averages/_decays.py",
          "return decays.index(decay)", "return 0",
          "//tests/v1:moving_average_checkpoint_test")
  yield m("in place: compiled steps are not checked",
          "wrapopt/_averages/_swap.py",
          '  return _in_groups("check_initialized"',
          '  return [] and _in_groups("check_initialized"',
          "//tests/keras:in_place_test")
  yield m("in place: two optimizers at once", "wrapopt/_averages/_swap.py",
          "        if id(v) in in_place:", "        if False:",
          "//tests/keras:in_place_test")
  yield m("in place: a value from inside the block is lost in silence",
          "wrapopt/_averages/_swap.py", "  if any(map(bool, replaced)):",
          "  if False:", "//tests/keras:in_place_test")
  for name, file, before, after, tests in (
      ("averages of variables without a value start at 0", "_waiting",
       "_followers.where(self._wait.read_value(), start)", "pass",
       "unlifted_test"),
      ("averages are of weights before the constraint", "_inner",
       "getattr(v, \"constraint\", None) is not None for v in variables)",
       "False for v in variables)", "conformance_test"),
      ("a method on an optimizer is passed over", "_methods", "if names:",
       "if False:", "methods_test"),
      ("a method on a class is passed over", "_rules",
       "getattr(cls, name) is method for name", "True for name",
       "methods_test")):
    yield m(f"Keras: {name}", f"wrapopt/keras/{file}.py", before, after,
            f"//tests/keras:{tests}")
  yield m("v1: a method on an optimizer is passed over",
          "wrapopt/_v1/_fused.py", "not _NAMES.isdisjoint(vars(opt))", "False",
          "//tests/v1:fused_test --test_filter=set_on")
  yield m("gate: a step counts twice", "wrapopt/drop_stale_gradient.py",
          "increment=not taken.counted", "increment=True",
          "//tests/v1:drop_stale_gradient_test")
  yield m("gate: the newest of several records counts",
          "wrapopt/_gates/_recorder.py", "tf.reduce_min(tf.stack(records))",
          "tf.reduce_max(tf.stack(records))",
          "//tests/v1:drop_stale_gradient_test")
  for name, file, before, after in (
      ("the newest of several records counts", "drop_stale_gradient",
       "tf.reduce_min(tf.stack(found))", "tf.reduce_max(tf.stack(found))"),
      ("steps of several ops do not wait", "_admission",
       "gate is not None and not is_one_op", "False"),
      ("a step is counted before its changes", "_inner",
       "tf.control_dependencies(_records.updates(new))",
       "tf.control_dependencies([])"),
      ("the number is the count of now", "_inner",
       "_admission.Number(asked.number, iterations.dtype)",
       "_admission.Number(tf.identity(iterations), iterations.dtype)"),
      ("a step that fails keeps its place", "_inner",
       "asked.ticket = None", "pass")):
    yield m(f"Keras gate: {name}", f"wrapopt/keras/{file}.py", before, after,
            "//tests/keras:gate_test")
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
      ("Adam's powers without a lock", "_v1/_step",
       "type(self._opt)._finish is _Optimizer._finish", "True"),
      ("a second try resets a count", "keras/_first_step",
       "begins = step.accept & (", "begins = ("),
      ("a second try moves averages of statistics", "keras/moving_average",
       "_decays.where_due(step.accept, decays)", "decays")):
    yield m(f"workers: {name}", f"wrapopt/{file}.py", before, after,
            "//tests/workers:coordinator_test")
  for name, file, before, after in (
      ("gradients are not summed", "keras/_rules",
       "if _replicas.share_steps():", "if False:"),
      ("gradients are not summed in v1", "_v1/_fused",
       "if not _replicas.share_steps() or step.options.get(",
       "if True or step.options.get("),
      ("all change the first one's copies", "_averages/_replicas",
       "return components_[values_util.get_current_replica_id_as_int()]",
       "return components_[0]"),
      ("one's step alone is counted", "_v1/_fused",
       "_replicas.values(step.global_step) if counts else ()",
       "_replicas.values(step.global_step)[:1] if counts else ()")):
    yield m(f"replicas: {name}", f"wrapopt/{file}.py", before, after,
            "//tests/keras:replicas_test")
  yield m("elastic: the center is pushed away", "wrapopt/_v1/_elastic.py",
          "flat - center_flat, centers", "center_flat - flat, centers",
          "//tests/v1:elastic_average_test")
  yield m("saver: nothing is swapped", "wrapopt/_v1/_swapping_saver.py",
          "swapped[key][i], swapped[average_key][j] = average, variable",
          "swapped[key][i], swapped[average_key][j] = variable, average",
          "//tests/v1:moving_average_checkpoint_test")
  for name, file, before, after, tests in (
      ("Schedule-Free: y stays at z after a step in two passes",
       "_averages/_two_passes", "      v.assign(_interpolated.y_of(",
       "      (_interpolated.y_of(", "both:interpolated_test"),
      ("Schedule-Free: a failed step in two passes leaves z in place",
       "_averages/_two_passes", "      v.assign(y)\n", "      pass\n",
       "keras:interpolated_test"),
      ("some variables: a list may be of another graph", "_v1/_listed",
       "if _slots.graph_of(v) is not graph:", "if False:",
       "v1:some_variables_test"),
      ("some variables: calls may get different ones of a list",
       "_v1/_listed", "if before.get(id(v), is_got[id(v)]) != is_got[id(v)]:",
       "if False:", "v1:some_variables_test"),
      ("checkpoint: another order of the decays is not noticed",
       "_v1/_averaging", "if f\"{name}_{self.decays[0]}\" in saved:",
       "if False:",
       "v1:moving_average_checkpoint_test"),
      ("gate: an eager step that was cut off counts", "_v1/_gate_counts",
       "ops.take_aborted_back(self._eager_step, histogram)", "pass",
       "v1:drop_stale_gradient_test"),
      ("gate: a worker's counts are those of all", "_v1/_gate_counts",
       "self._worker_histograms.get(graph or self) if of_worker else",
       "None if False else", "v1:drop_stale_gradient_test"),
      ("lazy rows: though a graph changes the table",
       "_averages/_may_be_lazy",
       "not _lagging.is_changed_in_graph(variable) and", "",
       "both:stale_rows_test"),
      ("Keras: a variable without a gradient keeps its first value",
       "keras/_store", "elif self.without_gradient:",
       "elif False:", "keras:conformance_test"),
      ("Keras: a step that fails leaves its thread waiting", "keras/_inner",
       "        mine.late = None", "        pass",
       "keras:conformance_test"),
      ("Keras: squares of a row's gradients are those of their sum",
       "keras/_rules", '{"epsilon": opt.epsilon}, squares=True)',
       '{"epsilon": opt.epsilon})', "keras:lazy_test"),
      ("v1: a dropped gradient travels", "_v1/_step",
       "parts = tf.cond(accept, admitted, dropped)",
       "parts = tf.cond(accept, admitted, admitted)",
       "workers:cluster_test")):
    yield m(name, f"wrapopt/{file}.py", before, after, f"//tests/{tests}")


MUTANTS = list(_mutants())
