# SPDX-License-Identifier: Apache-2.0
"""Networks that come with the library: files, folders of runs, errors."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnres_jax
from attnres_jax import config as config_lib
from attnres_jax.common import trees
from attnres_jax.inference import packaged
from attnres_jax.inference import sample
from attnres_jax.interop import export_huggingface
from attnres_jax.train import checkpoint
from tests import tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """The folder of a finished run of Block AttnRes."""
  folder = tmp_path_factory.mktemp("run")
  fields = {"train.steps": 5, "train.eval_every": 0, "data.batch_size": 8}
  tiny_run.train_here(folder, tiny_run.corpus(folder.parent) | fields)
  return folder


@pytest.fixture
def packages(run, tmp_path, monkeypatch):
  """The folder of packaged networks, with that of the run."""
  monkeypatch.setattr(packaged, "FOLDER", tmp_path / "trained")
  packaged.write(run, "CC0-1.0", packaged.FOLDER)
  return packaged.FOLDER


def test_weights_are_those_of_the_run_in_bfloat16(run, packages):
  (name,) = packaged.names()
  model = attnres_jax.load_trained(name)
  _, trained = checkpoint.load_model(run)
  narrow, exact = trees.to_flat(model), trees.to_flat(trained)
  assert narrow.keys() == exact.keys()
  for path, leaf in exact.items():
    assert narrow[path].dtype == leaf.dtype
    expected = np.asarray(jnp.asarray(leaf, jnp.bfloat16), leaf.dtype)
    np.testing.assert_array_equal(narrow[path], expected, err_msg=path)
  origin = json.loads((packages / name / packaged.ORIGIN).read_text())
  assert origin["licence_of_text"] == "CC0-1.0"
  summary = json.loads((run / "summary.json").read_text())
  assert origin["validation_loss"] == summary["validation_loss"]


def test_commands_take_one_as_a_run(packages, tmp_path, capsys):
  (name,) = packaged.names()
  workdir = f"--workdir=attnres_jax:trained/{name}"
  assert sample.main([workdir, "--prompt=de", "--num_tokens=3"]) == 0
  assert "de" in capsys.readouterr().out
  assert export_huggingface.main([workdir, f"--path={tmp_path / 'out'}"]) == 0
  assert (tmp_path / "out/model.safetensors").exists()


def test_what_comes_along_is_small_and_has_its_origin():
  assert packaged.names() == ["block_attnres", "full_attnres", "prenorm"]
  for name in packaged.names():
    folder = packaged.FOLDER / name
    assert (folder / packaged.WEIGHTS).stat().st_size < 3e6
    origin = json.loads((folder / packaged.ORIGIN).read_text())
    assert "PSF-2.0" in origin["licence_of_text"] and origin["commit"]
    model = attnres_jax.load_trained(name)
    assert model.config.residual.name == name
    # Of its own text, it knows what follows. Bytes at random cost 5.5 nats.
    text = b"import os\nimport sys\n\n\ndef main(argv=None):\n  return "
    tokens_BT = jnp.asarray([[256, *text]])
    logits_BTV = jax.jit(lambda model, tokens: model(tokens))(model, tokens_BT)
    log_BTV = jax.nn.log_softmax(logits_BTV.astype(jnp.float32))
    told_BT = log_BTV[0, jnp.arange(len(text)), tokens_BT[0, 1:]]
    assert -jnp.mean(told_BT) < 1.5


def test_a_wrong_name_gets_one_line(packages, capsys):
  (name,) = packaged.names()
  assert sample.main(["--workdir=attnres_jax:trained/blok", "--prompt=x"]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line == f"error: --workdir: got 'blok', expected one of {name}"
  with pytest.raises(config_lib.ConfigError, match="name: got 'blok'"):
    attnres_jax.load_trained("blok")


def test_an_unfinished_run_is_refused(run, tmp_path):
  (run / "summary.json").rename(tmp_path / "kept")
  try:
    with pytest.raises(config_lib.ConfigError, match="a finished run"):
      packaged.write(run, "CC0-1.0", tmp_path / "trained")
    assert not (tmp_path / "trained").exists()
  finally:
    (tmp_path / "kept").rename(run / "summary.json")
