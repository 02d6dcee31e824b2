"""The examples run, show what the guides say, and check their options."""

import importlib
import json
import os
import uuid

import keras
from matplotlib import image
import numpy as np
import pytest
import tensorflow as tf

import processes
import wrapopt
from wrapopt.examples import _tasks
from wrapopt.examples import averages
from wrapopt.examples import cluster_digits
from wrapopt.examples import choosing
from wrapopt.examples import digits
from wrapopt.examples import diloco
from wrapopt.examples import embeddings
from wrapopt.examples import keras_digits
from wrapopt.examples import staleness

tf1 = tf.compat.v1


def run(tmp_path, program, *args, figure="curves.png"):
  """Runs an example as a user does.

  Args:
    tmp_path: A folder.
    program: The name of the example, and of its part.
    *args: Its options.
    figure: The name of the image that it draws, or None.

  Returns:
    The folder of its files, its results, and the words of its lines.
  """
  out, mark = tmp_path / "a" / "b", uuid.uuid4().hex
  done = processes.run_python(
      "-m", f"wrapopt.examples.{program.split()[0]}", *program.split()[1:],
      *map(str, args), "--out", str(out), MARK=mark)
  assert done.returncode == 0, done.stderr
  print(done.stderr)  # For a test that fails: why sessions were made anew.
  assert "Warning" not in done.stderr
  assert "/s]" not in done.stdout  # The progress bar is not in the output.
  results = json.loads((out / "results.json").read_text())
  assert results["out"] == str(out) and results["seconds"] > 0
  assert results["versions"]["wrapopt"] == wrapopt.__version__
  assert results["versions"]["tensorflow"] == tf.__version__
  assert results["wrapopt_path"] == os.path.dirname(
      os.path.abspath(wrapopt.__file__))
  lines = [line.split() for line in done.stdout.splitlines()]
  assert lines[-1] == [str(out / "results.json")]
  if figure is not None:
    assert [str(out / figure)] in lines
    pixels = image.imread(out / figure)  # Decodes all of it.
    for color in ((63, 144, 218), (255, 169, 14)):  # Blue and orange.
      same = np.abs(pixels[..., :3] * 255 - color).max(axis=-1) < 1
      assert same.sum() > 100, color
  processes.wait_until(lambda: not processes.marked(mark), "processes are left")
  return out, results, lines


def check_curve(results, steps, measures, lines):
  """Checks steps and the last line of a table; returns the last row."""
  curve = results["curve"]
  assert [row["step"] for row in curve] == steps
  assert any(row["raw"] != row["averaged"] for row in curve)
  last = curve[-1]
  assert [str(steps[-1]), *(
      f"{measure(last[weights]):.2f}" for measure in measures.values()
      for weights in ("raw", "averaged"))] in lines
  return last


def test_digits(tmp_path):
  out, results, lines = run(tmp_path, "digits", "--steps", 120, "--seed", 3)
  last = check_curve(results, list(range(3, 121, 3)), digits.MEASURES, lines)
  assert last["averaged"]["accuracy"] > 0.75  # Of a guess, 0.1.
  assert results["fused"] is True
  assert [str(out / "model.ckpt")] in lines

  # The checkpoint has the averages under the names of the weights.
  names = tf.train.load_checkpoint(
      str(out / "model.ckpt")).get_variable_to_shape_map()
  weights = {f"{layer}/{kind}" for layer in ("conv1", "conv2", "dense1",
                                             "dense2")
             for kind in ("kernel", "bias")}
  assert set(names) == weights | {"global_step"} | {
      f"{w}/{slot}" for w in weights
      for slot in ("Momentum", "ExponentialMovingAverage")}
  _, (images, labels) = _tasks.load_digits(seed=3)
  for weights, suffix in (("averaged", ""),
                          ("raw", "/ExponentialMovingAverage")):
    with tf.Graph().as_default(), tf1.Session() as session:
      logits = _tasks.logits_of(tf.constant(images))
      tf1.train.Saver({v.op.name + suffix: v for v in tf1.global_variables()}
                     ).restore(session, str(out / "model.ckpt"))
      assert _tasks.accuracy_of(
          session.run(logits), labels) == last[weights]["accuracy"]


def check_file(out, model, data, last):
  """The file has the averages."""
  model.load_weights(str(out / "averaged.weights.h5"))
  model.compile(
      loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  loss = model.evaluate(*data, verbose=0)
  assert loss == pytest.approx(last["averaged"]["loss"], rel=1e-4)
  assert loss != pytest.approx(last["raw"]["loss"], rel=1e-3)


def test_keras_digits(tmp_path):
  out, results, lines = run(tmp_path, "keras_digits", "--steps", 160, "--seed",
                            3)
  last = check_curve(results, list(range(4, 161, 4)), digits.MEASURES, lines)
  assert last["averaged"]["accuracy"] > 0.75
  assert results["fused"] is True
  check_file(out, _tasks.make_net(), _tasks.load_digits(seed=3)[1], last)


def test_embeddings(tmp_path):
  out, results, lines = run(tmp_path, "embeddings", "--steps", 60, "--files",
                            12, "--seed", 3)
  last = check_curve(results, list(range(3, 61, 3)), embeddings.MEASURES, lines)
  for weights in "raw", "averaged":
    assert np.exp(last[weights]["loss"]) < 1600  # Of 2000 words.
    assert last[weights]["hits"] > 0.1  # Of a guess, 0.005.
  assert results["lazy"] is True
  assert 1000 < results["trained_rows"] < 2**18
  assert results["words"]["trained_on"] > 3 * results["words"]["held_out"] > 300
  documents = _tasks.read_documents(12)
  assert len(documents) == len(set(documents)) == results["documents"] > 50
  check_file(out, embeddings.make_model(),
             embeddings.make_samples(documents, seed=3)[1], last)


def test_samples():
  """Each word, with the rows of the words before it in its document."""
  documents = [("a", "b", "a", "c")] * 9 + [("a", "b")]
  (rows, words), (held_rows, held_words) = embeddings.make_samples(documents, 0)
  assert len(words) + len(held_words) == sum(map(len, documents))
  assert rows.shape == (len(words), 5) and rows.dtype == np.int32
  assert rows.min() >= 0 and rows.max() < 2**18
  # The numbers are by frequency; nobody knows a word that is held out only.
  a, b, _, c = words[:4]
  assert (a, b) == (1, 2) and c == 3
  # After "a", at the start, the same whichever document; "b a" is another.
  np.testing.assert_array_equal(rows[0], rows[4])
  assert rows[1, 0] == rows[3, 0] and rows[1, 3] != rows[3, 3]
  # Alone, a word's row depends on how far back it is.
  assert rows[1, 0] != rows[2, 1]
  assert held_rows.shape == (len(held_words), 5)


def test_decays(tmp_path):
  _, results, lines = run(tmp_path, "averages decays", "--epochs", 1, 2,
                          "--seeds", 1, figure=None)
  assert lines.count(["after", "epochs", "1", "2"]) == 4
  found = {(row["average"], row["statistics"]): row["accuracies"][0]
           for row in results["rows"]}
  power = found["PowerDecay(0.1)", "recalibrated"]
  assert ["PowerDecay(0.1)", *(f"{x:.1%}" for x in power)] in lines
  # As the guide says: an average without warm-up stays at the initial weights,
  # and the statistics of the raw weights do not fit it.
  assert found["0.999", "recalibrated"][1] < 0.6 < 0.9 < power[1]
  assert found["0.99", "raw"][0] < found["0.99", "recalibrated"][0] - 0.2


def test_widths(tmp_path):
  _, results, lines = run(tmp_path, "averages widths", "--steps", 800, "--seed",
                          3, figure="widths.png")
  assert results["snapshots"] == 7 * 16
  rows = results["rows"]
  assert [row["steps"] for row in rows] == [200] * 9 + [400] * 9 + [800] * 9
  assert sum(line[:1] == ["800"] for line in lines) == 9
  tracked = [row for row in rows[-9:] if "tracked_accuracy" in row]
  assert [row["width"] for row in tracked] == [0.03, 0.07, 0.15, 0.2, 0.25]
  for row in tracked:
    # An error of the profile is one of the weights only as far as the weights
    # change over the training: by much less than their size.
    assert row["weights_error"] < 0.2 * row["profile_error"]
    assert abs(row["accuracy"] - row["tracked_accuracy"]) <= 2.01 / 599
    assert row["accuracy"] > 0.9
  assert results["best"]["accuracy"] == max(row["accuracy"]
                                            for row in rows[-9:])


def test_session(tmp_path):
  """The slow worker is dropped, and the others are not."""
  _, results, lines = run(tmp_path, "staleness session", "--steps", 300,
                          "--rest", 1.0, "--seed", 3, figure="staleness.png")
  *others, slow = workers = results["workers"]
  for worker in workers:
    assert sum(worker["admitted"]) + sum(worker["dropped"]) == worker["tried"]
    assert sum(worker["admitted"][21:]) == 0
  # Its last gradients may be fresh: the others have ended.
  assert sum(slow["dropped"]) >= 1 and sum(slow["admitted"]) <= 2
  assert all(w["tried"] > 50 and sum(w["dropped"]) == 0 for w in others)
  # Each worker may begin one more before it sees the end.
  assert 300 <= sum(sum(w["admitted"]) for w in workers) <= 303
  assert all(w["accuracy"] > 0.6 for w in workers)
  assert ["2,", "slow", str(slow["tried"])] in [line[:3] for line in lines]


def test_coordinator(tmp_path):
  _, results, lines = run(
      tmp_path, "staleness coordinator", "--steps", 250, "--limit", 5, "--rest",
      0.3, "--seed", 3, figure="staleness.png")
  runs = results["runs"]
  assert list(runs) == ["Keras", "no limit", "limit 5"]
  for name, found in runs.items():
    assert found["iterations"] <= 250
    assert found["accuracy"] > 0.4
    assert [*name.split(), str(found["iterations"])] in [
        line[:len(name.split()) + 1] for line in lines]
    if name != "Keras":
      assert found["iterations"] == sum(found["admitted"]) == 250 - sum(
          found["dropped"])
  assert sum(runs["no limit"]["dropped"]) == 0
  assert sum(runs["limit 5"]["admitted"][6:]) == 0


def check_comparison(task, errors, label, lines):
  """Checks the numbers of errors, and one line of a table."""
  assert [len(row) for row in errors] == [4, 4], task
  last = [row[-1] for row in errors]
  shown = [f"{np.mean(last):.2f}", f"({min(last):.2f}", "-",
           f"{max(last):.2f})"]
  at = len(label)
  assert any(line[:at] == label and shown in (
      line[i:i + 4] for i in range(at, len(line))) for line in lines), shown


def test_policies(tmp_path):
  _, results, lines = run(
      tmp_path, "staleness policies", "--quick", "--steps", 40, "--seeds", 2,
      "--tasks", "digits", "cancer")
  assert results["points"] == [10, 20, 30, 40]
  for task, found in results["tasks"].items():
    assert found.keys() == {"sequential", *(
        f"{method}, {n} workers in turn" for method in staleness.METHODS
        for n in (2, 4))}
    for contender, of in found.items():
      check_comparison(task, of["errors"], [contender.split(",")[0]], lines)
  # It learns: guesses are wrong in 37 % of the samples.
  cancer = results["tasks"]["cancer"]["sequential"]["errors"]
  assert np.mean(cancer, axis=0)[-1] < 15


def test_diloco(tmp_path):
  _, results, lines = run(tmp_path, "diloco", "--quick", "--tasks", "digits",
                          "--seeds", 1, figure="diloco.png")
  found = results["tasks"]["digits"]
  assert tuple(found) == diloco.WAYS
  for of in found.values():
    assert len(of["tried"]) == 2
    assert all(0 <= error <= 100 for _, error in of["tried"])
  curves = {way: of["errors"] for way, of in found.items()}
  n = sum(v.shape.num_elements() for v in _tasks.make_net().weights)
  size, scales = 4 * n, 4 * -(-n // 128)
  sent = {way: of_seed[-1][2] for way, [of_seed] in curves.items()}
  # The gate drops few gradients.
  assert 80 * size < sent.pop("asynchronous") <= 100 * size
  # Each of two fragments may end with part of a block.
  assert 0 <= sent.pop("streaming") - sent["int4"] <= 5 * 5
  assert sent == {
      "alone": 0, "all data": 0, "synchronous": 100 * size,
      **dict.fromkeys(["elastic", "LocalSGD", "DiLoCo", "fragments", "overlap"],
                      5 * size),
      "bfloat16": 5 * size / 2, "int8": 5 * (n + scales),
      "int4": 5 * (-(-n // 2) + scales)}
  for [of_seed] in curves.values():
    assert [row[0] for row in of_seed] == list(range(0, 101, 20))
    assert of_seed[-1][3] < 50 < of_seed[0][3]  # It learns.
  assert sum(line[:1] == ["streaming"] for line in lines) == 1


def test_ways_that_send_nothing(tmp_path):
  _, results, _ = run(tmp_path, "diloco", "--quick", "--tasks", "digits",
                      "--seeds", 1, "--ways", "alone", figure=None)
  assert list(results["tasks"]["digits"]) == ["alone"]


def simulation():
  task = staleness.TASKS["cancer"]
  return staleness.make_simulation(task, task.load(1))


@pytest.mark.by_day(2)
@pytest.mark.parametrize("method", staleness.METHODS)
def test_one_worker_is_sequential(method):
  simulate = simulation()
  arguments = 1, "in turn", 0.1, 2.0, 3, [10, 20], "held_out"
  want, weights, _ = simulate("sequential", *arguments)
  values = [w.numpy() for w in weights]
  got, _, opt = simulate(method, *arguments)
  assert got == want
  assert method == "asynchronous" or not opt.staleness_stats().dropped
  for w, x in zip(weights, values):
    np.testing.assert_array_equal(w.numpy(), x)


def test_the_delay_is_exact():
  # Of four workers in turn, each gradient misses three updates, but the first.
  _, _, opt = simulation()("scaled", 4, "in turn", 0.1, None, 0, [40],
                           "held_out")
  assert list(opt.staleness_stats().admitted_histogram[:5]) == [1, 1, 1, 37, 0]


def test_choosing(tmp_path):
  _, results, lines = run(
      tmp_path, "choosing", "--quick", "--steps", 48, "--seeds", 2, "--tasks",
      "digits_conv", "text")
  assert list(results["tasks"]) == ["digits_conv", "text"]
  assert results["points"] == [12, 24, 36, 48]
  for task, found in results["tasks"].items():
    assert list(found) == list(choosing.SETTINGS)
    for contender, row in found.items():
      # One setting, and two rates.
      (low, a), (high, b) = row["tried"]
      assert row["best"] == (low if a <= b else high)
      check_comparison(task, row["errors"], contender.split(), lines)
      assert [f"{row['best'][1]:g}", str(row["best"][0])] in [
          line[-2:] for line in lines if line[:1] == contender.split()[:1]]
  # They learn: guesses are wrong in 90 % of the scans.
  assert all(np.mean(row["errors"], axis=0)[-1] < 40
             for row in results["tasks"]["digits_conv"].values())


RUNS = {name: values[1] for name, values in choosing.SETTINGS.items()
        if name not in ("EMA", "SWA, LAWA", "WSM", "BEMA")}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_does_not_depend_on_the_ones_before(name):
  task = choosing.TASKS["diabetes"]
  train, fresh = (
      choosing.make_trainer(task, task.load(1), 20, name, RUNS[name])
      for _ in range(2))
  train(0.03, 1, [20], "validation")
  errors = train(0.01, 2, [10, 20], "validation")
  assert errors == fresh(0.01, 2, [10, 20], "validation")
  assert len(errors) == (13 if name == "constant" else 1)
  assert errors[None][0] != errors[None][1]


def test_averages_of_a_run():
  """Means and merges of the weights, and what the optimizer keeps."""
  v = keras.Variable([0.0])
  opt = choosing.make_optimizer("constant", 0.05, 8)
  opt.build([v])
  kept = {}
  for t in range(1, 9):
    opt.apply([tf.constant([-1.0])], [v])
    kept[t] = [np.float32([t])]
  found = choosing.weights_of(opt, [v], kept)
  # The mean of 5, 6, 7 and 8.
  assert found["SWA, LAWA", 0.4][0][0] == 6.5
  # At the full rate to 4.8, and half of the way from there to 8.
  np.testing.assert_allclose(found["WSM", 0.4][0], 4.8 + 1.6, 1e-6)
  for width, decay in zip((0.05, 0.1, 0.2), opt.decays()):
    np.testing.assert_array_equal(found["EMA", width][0],
                                  opt.average(v, decay))


def test_rates():
  rates = {name: choosing.rates_of(name, setting, 2.0, 60)
           for name, setting in RUNS.items()}
  ramp = [2 / 3, 4 / 3]
  for run_ in "constant", "GPA":
    np.testing.assert_allclose(rates[run_], [*ramp, *[2] * 58], rtol=1e-6)
  np.testing.assert_allclose(
      rates["cosine"], [*ramp, 2, *(1 + np.cos(np.pi * i / 57)
                                    for i in range(57))], rtol=1e-5)
  # The warm-up is an argument of the optimizer.
  for run_ in rates.keys() & {"Keras's y", "Schedule-Free"}:
    np.testing.assert_array_equal(rates[run_], [2.0] * 60)


@pytest.mark.parametrize("killed", [False, True], ids=["all", "killed"])
def test_cluster_digits(killed, tmp_path):
  """The workers agree after each round, also without a killed one."""
  rounds = 20
  _, results, lines = run(tmp_path, "cluster_digits", "--rounds", rounds,
                          "--seed", 3, *["--kill-worker"] * killed)
  workers = results["workers"]
  assert list(workers) == ["/job:chief/task:0", "/job:worker/task:0",
                           "/job:worker/task:1"]
  assert (workers["/job:worker/task:1"] is None) == killed
  assert (["/job:worker/task:1", "killed"] in lines) == killed
  there = [w for w in workers.values() if w]
  assert sum(w["scans"] for w in there) <= results["alone"][1]["scans"]
  chief = there[0]
  assert [row[0] for row in chief["curve"]] == list(range(1, rounds + 1))
  means = {row[0]: row[2] for row in chief["curve"]}
  for worker in there:
    assert worker["steps"] == 20 * len(worker["curve"])
    # A loaded machine may have made it late for some.
    assert len(worker["curve"]) > rounds / 2
    for over, _, mean in worker["curve"]:
      assert mean == means[over]
  own = np.array([[row[1] for row in w["curve"]][-5:] for w in there])
  assert own.std() > 0  # They train apart.
  assert means[rounds] > 0.7
  assert means[rounds] >= own.mean() - 0.02
  assert f"{means[rounds]:.2%}" in [line[-1] for line in lines if line]


def test_no_process_is_left_of_one_that_is_killed(tmp_path):
  # Itself, the one that forks, its helper, and four tasks.
  processes.kill_in_the_middle(
      "wrapopt.examples.cluster_digits", "--rounds", "1000000", "--out",
      str(tmp_path), least=6, log=tmp_path / "err")


def test_held_out_is_held_out():
  """No scan is in both halves, and a seed gives the same halves."""
  (train_x, train_y), (test_x, test_y) = _tasks.load_digits(seed=5)
  train = {x.tobytes() for x in train_x}
  assert not train & {x.tobytes() for x in test_x}
  assert sorted(np.unique(test_y)) == sorted(np.unique(train_y)) == list(
      range(10))
  (again, _), _ = _tasks.load_digits(seed=5)
  (other, _), _ = _tasks.load_digits(seed=6)
  np.testing.assert_array_equal(train_x, again)
  assert not np.array_equal(train_x, other)
  assert train_x.min() == 0 and train_x.max() == 1


@pytest.mark.parametrize("example", [digits, keras_digits])
def test_a_restored_model_that_differs_is_an_error(example, monkeypatch,
                                                   tmp_path):
  restore = digits.restore
  monkeypatch.setattr(
      digits, "restore", lambda *args: np.nextafter(restore(*args), np.inf))
  monkeypatch.setattr(keras.Model, "load_weights", lambda *_: None)
  with pytest.raises(SystemExit,
                     match="is not the averaged one: logits differ"):
    example.main(["--steps", "2", "--out", str(tmp_path)])
  assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize("example, arguments, error", [
    (digits, "--steps 0", "must be at least 1, got 0"),
    (digits, "--steps x", "invalid int value: 'x'"),
    (averages, "decays --epochs 1 0", "must be at least 1, got 0"),
    (cluster_digits, "--rounds 1", "must be at least 2, got 1"),
    (choosing, "--tasks cancer", "invalid choice: 'cancer'"),
    (diloco, "--ways int2", "invalid choice: 'int2'"),
    (staleness, "session --limit -1", "must be at least 0, got -1"),
    (staleness, "session --rest nan", "must be at least 0.01, got nan")])
def test_options_are_checked(example, arguments, error, capsys):
  with pytest.raises(SystemExit) as e:
    example.main(arguments.split())
  assert e.value.code == 2
  option = arguments.split()[-2 if "epochs" not in arguments else 1]
  assert f"argument {option}: {error}" in capsys.readouterr().err


@pytest.mark.parametrize("example, part", [(averages, "widths"),
                                           (staleness, "policies")])
def test_parts_are_listed(example, part, capsys):
  for arguments in [], ["--help"]:
    with pytest.raises(SystemExit):
      example.main(arguments)
  out, err = capsys.readouterr()
  assert part in out and "PART" in err


@pytest.mark.parametrize("package", ["sklearn", "matplotlib", "tqdm"])
def test_a_missing_package_is_said_before_any_work(
    package, monkeypatch, tmp_path):
  load = importlib.import_module

  def import_module(name):
    if name.split(".")[0] == package:
      raise ModuleNotFoundError(f"No module named '{package}'", name=package)
    return load(name)

  monkeypatch.setattr(importlib, "import_module", import_module)
  out = tmp_path / "out"
  with pytest.raises(SystemExit) as e:
    digits.main(["--out", str(out)])
  assert str(e.value) == (
      "The examples, benchmarks and commands need the Python module "
      f"'{package}', which is not installed. Install it and what else they "
      "need with: pip install matplotlib scikit-learn tqdm")
  assert not out.exists()


def test_a_package_that_is_broken_is_not_called_missing(monkeypatch):
  def import_module(name):
    raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

  monkeypatch.setattr(importlib, "import_module", import_module)
  with pytest.raises(ModuleNotFoundError, match="scipy"):
    digits.main([])
