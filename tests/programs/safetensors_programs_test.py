"""Merges of checkpoints that other libraries have written, without TensorFlow.

PyTorch, Hugging Face's transformers and Keras on JAX and PyTorch write them in
processes of their own, and load the results.
"""

import pathlib
import subprocess
import sys

import pytest

import wrapopt

ROOT = pathlib.Path(wrapopt.__file__).parents[1]
# The packages of others, and not those of this process.
PYTHON = pathlib.Path(sys.prefix).parent / ".venv-torch/bin/python"

TRANSFORMERS = """
import sys, torch, transformers
from wrapopt import checkpoints

def made(seed):
  torch.manual_seed(seed)
  return transformers.GPT2LMHeadModel(transformers.GPT2Config(
      n_layer=2, n_head=2, n_embd=32, vocab_size=300, n_positions=40)).eval()

models = [made(seed) for seed in range(3)]
folders = [f"run/checkpoint-{n}" for n in (100, 200, 300)]
for model, folder in zip(models, folders):
  model.save_pretrained(folder, max_shard_size="80KB")
import os
assert "model.safetensors.index.json" in os.listdir(folders[0])
checkpoints.merge(folders, "merged", weights=[1, 2, 1], copy_rest=True)
expected = made(9)
with torch.no_grad():
  for name, p in expected.named_parameters():
    p.copy_(sum(w * dict(m.named_parameters())[name].double()
                for w, m in zip([.25, .5, .25], models)))
merged = transformers.GPT2LMHeadModel.from_pretrained("merged").eval()
assert merged.lm_head.weight is merged.transformer.wte.weight  # Tied.
tokens = torch.arange(20)[None]
with torch.no_grad():
  torch.testing.assert_close(merged(tokens).logits, expected(tokens).logits,
                             rtol=0, atol=0)
assert os.path.exists("merged/config.json")
assert not any(name.split(".")[0] == "tensorflow" for name in sys.modules)
"""

KERAS = """
import sys, keras, numpy as np
from wrapopt import checkpoints

def made(seed):
  keras.utils.set_random_seed(seed)
  model = keras.Sequential([
      keras.Input((6,)), keras.layers.Dense(5, "relu"),
      keras.layers.BatchNormalization(), keras.layers.Dense(2)])
  model.compile(keras.optimizers.Adam(0.01), "mse")
  model.fit(np.ones((8, 6)), np.ones((8, 2)), verbose=0)
  return model

models = [made(seed) for seed in range(2)]
for kind, save in (("keras", "save"), ("weights.h5", "save_weights")):
  for i, model in enumerate(models):
    getattr(model, save)(f"{i}.{kind}")
  checkpoints.merge([f"{i}.{kind}" for i in range(2)], f"mean.{kind}")
  if kind == "keras":
    merged = keras.models.load_model("mean.keras")
  else:
    merged = made(5)
    merged.load_weights("mean.weights.h5")
  for v, *of in zip(merged.weights, *(m.weights for m in models)):
    if "seed" in v.path:
      continue
    of = [keras.ops.convert_to_numpy(x).astype("float64") for x in of]
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(v),
                                  np.float32((of[0] + of[1]) / 2), v.path)
assert keras.backend.backend() == sys.argv[1]
assert not any(name.split(".")[0] == "tensorflow" for name in sys.modules)
"""


def run(program, folder, *args, **env):
  done = subprocess.run(
      [PYTHON, "-c", program, *args], cwd=folder, capture_output=True,
      text=True, check=False, env={
          "PATH": "/usr/bin:/bin", "HOME": str(folder),
          "PYTHONPATH": str(ROOT), **env})
  assert done.returncode == 0, done.stderr


def test_transformers(tmp_path):
  """Shards, tied embeddings, a configuration that is copied."""
  run(TRANSFORMERS, tmp_path)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_keras_without_tensorflow(tmp_path, backend):
  run(KERAS, tmp_path, backend, KERAS_BACKEND=backend)
