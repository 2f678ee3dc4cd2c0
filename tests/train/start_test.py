# SPDX-License-Identifier: Apache-2.0
"""A run that continues another one, from its weights on."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.common import trees
from attnres_jax.train import checkpoint
from attnres_jax.train import start
from attnres_jax.train import train_state
from tests import tiny_run

QUICK = {
  "mesh.data": 1, "train.steps": 6, "train.eval_every": 0,
  "train.depth_every": 0,
  "checkpoint.every_steps": 4, "optim.schedule": "constant",
  "optim.warmup_steps": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
  return QUICK | tiny_run.corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def run(tmp_path_factory, fields):
  folder = tmp_path_factory.mktemp("runs") / "first"
  with tiny_run.traced_once():
    tiny_run.train_here(folder, fields)
  return folder


def _load(fields):
  config = tiny_run.config(fields).with_vocab_size(257)
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
  return start.find(config).load(train_state.make_program(config, mesh))


def _assert_equal(model, other):
  jax.tree.map(np.testing.assert_array_equal, model, other)


def test_begins_with_the_weights_and_the_state_of_the_optimiser(run, fields):
  state, continued = _load(fields | {"train.start_from": str(run)})
  assert continued and int(state.step) == int(state.skipped) == 0
  restored = checkpoint.restore_latest(run, jax.eval_shape(lambda: state))
  assert restored.step == 6
  _assert_equal(state.model, restored.state.model)
  _assert_equal(state.opt_state, restored.state.opt_state)


def test_new_weights_make_room_for_those_that_are_read(
  run, fields, monkeypatch
):
  made, read = [], checkpoint.read
  init = train_state.Program.init_state

  def init_state(program):
    made.append(init(program))
    return made[-1]

  def read_late(*args):
    leaves = jax.tree.leaves((made[0].model, made[0].opt_state))
    assert all(leaf.is_deleted() for leaf in leaves)
    return read(*args)

  monkeypatch.setattr(train_state.Program, "init_state", init_state)
  monkeypatch.setattr(checkpoint, "read", read_late)
  _, continued = _load(fields | {"train.start_from": str(run)})
  assert made and continued


def test_any_checkpoint_and_another_optimiser(run, fields):
  path = run / checkpoint.CHECKPOINTS / "4"
  fields = fields | {"train.start_from": str(path), "optim.name": "muon"}
  fields["train.average_last"] = 0.5
  state, continued = _load(fields)
  assert not continued
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))
  flat = trees.to_flat({"model": jax.eval_shape(lambda: state.model)})
  _assert_equal(
    trees.to_flat({"model": state.model}), checkpoint.read(run, 4, flat)
  )
  _assert_equal(state.average, state.model)


@pytest.mark.more
def test_three_stages(run, fields, tmp_path):
  """Longer sequences, another schedule and a mixture; killed and resumed."""
  corpus = fields.pop("data.path")
  other = tiny_run.corpus(tmp_path)["data.path"]
  longer = fields | {
    "train.start_from": str(run), "data.paths": (corpus, other),
    "data.weights": (0.75, 0.25), "data.sequence_length": 32,
    "data.batch_size": 2, "optim.schedule": "linear",
    "optim.peak_lr": 1e-4, "checkpoint.every_steps": 2,
  }  # fmt: skip
  fields["data.path"] = corpus
  with tiny_run.traced_once():
    summary = tiny_run.train_here(tmp_path / "long", longer)
    assert summary["status"] == "finished" and summary["step"] == 6
    (event,) = tiny_run.events(tmp_path / "long", "started from")
    assert event["of_step"] == 6 and event["optimiser"]
    first, then = (
      tiny_run.rows(folder, "train")[1]["loss"]
      for folder in (run, tmp_path / "long")
    )
    # It goes on where the first run ended.
    assert then < first - 0.2
    # A resumed run does not look at where it started.
    again = shutil.copytree(tmp_path / "long", tmp_path / "again")
    tiny_run.rewind(again, 4)
    tiny_run.train_here(again, longer)
    tiny_run.assert_same_run(tmp_path / "long", again)


def test_refused(run, fields, tmp_path):
  def find(**changes):
    config = tiny_run.config(fields).with_vocab_size(257)
    train = dataclasses.replace(config.train, start_from=str(tmp_path / "run"))
    config = dataclasses.replace(config, train=train)
    if changes:
      model = dataclasses.replace(config.model, **changes)
      config = dataclasses.replace(config, model=model)
    return start.find(config)

  with pytest.raises(
    config_lib.ConfigError, match="start_from: got .*finished"
  ):
    find()
  copy = shutil.copytree(run, tmp_path / "run")
  assert find(remat="full", scan_layers=False).step == 6
  with pytest.raises(config_lib.ConfigError) as error:
    find(width=32, rope_theta=1.0)
  assert "config.model.width (16 there, 32 here)" in str(error.value)
  assert "config.model.rope_theta" in str(error.value)
  summary = json.loads((copy / "summary.json").read_text())
  (copy / "summary.json").write_text(
    json.dumps(summary | {"status": "stopped"})
  )
  with pytest.raises(config_lib.ConfigError, match="finished run"):
    find()


def test_a_damaged_checkpoint_is_not_used(run, fields, tmp_path):
  copy = shutil.copytree(run, tmp_path / "run")
  for path in (copy / checkpoint.CHECKPOINTS / "6").rglob("*"):
    if path.is_file() and path.stat().st_size > 1000:
      path.write_bytes(path.read_bytes()[:-100])
  with pytest.raises(checkpoint.CheckpointError, match="cannot be read"):
    _load(fields | {"train.start_from": str(copy)})
