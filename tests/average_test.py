# SPDX-License-Identifier: Apache-2.0
"""The average of the last weights is their mean, and survives a restart."""

import jax
import numpy as np
import pytest

from attnres_jax.common import sharding
from attnres_jax.train import checkpoint
from attnres_jax.train import metrics
from attnres_jax.train import train_state
from tests import compare
from tests import tiny_run


@pytest.fixture(scope="module", autouse=True)
def _traced_once():
  with tiny_run.traced_once():
    yield


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
  return tiny_run.corpus(tmp_path_factory.mktemp("data")) | {
    "mesh.data": 1,
    "model.residual.name": "prenorm",
    "train.depth_every": 0,
    "train.steps": 6,
    "train.eval_every": 2,
    "train.average_last": 0.5,
    "checkpoint.every_steps": 1,
  }


def _state(workdir, config):
  program = train_state.make_program(config, sharding.make_mesh(config.mesh))
  return checkpoint.restore_latest(workdir, program.abstract_state).state


def _at(workdir, step, config):
  """The state after a step: the newest checkpoint once later ones are gone."""
  for later in checkpoint.all_steps(workdir):
    if later > step:
      folder = workdir / checkpoint.CHECKPOINTS / str(later)
      folder.rename(workdir / f"later_{later}")
  return _state(workdir, config)


@pytest.mark.more
def test_mean_of_the_last_weights(fields, tmp_path):
  tiny_run.train_here(tmp_path, fields)
  config = tiny_run.config(fields).with_vocab_size(257)
  assert train_state.first_averaged(config.train) == 4
  loaded = {s: checkpoint.load_model(tmp_path, s)[1] for s in (3, 6)}
  states = {step: _at(tmp_path, step, config) for step in (6, 5, 4, 3)}
  mean = jax.tree.map(
    lambda *leaves: np.mean(leaves, axis=0),
    *(states[step].model for step in (4, 5, 6)),
  )
  average = jax.tree.leaves(states[6].average)
  for a, b in zip(average, jax.tree.leaves(mean), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
  first = train_state.make_program(
    config, sharding.make_mesh(config.mesh)
  ).init_state()
  compare.trees(states[3].average, first.model, 0)
  # What is sampled and exported is what was evaluated.
  for step, model in ((3, states[3].model), (6, states[6].average)):
    compare.trees(loaded[step], model, 0)
  rows = metrics.read_rows(tmp_path, "validation")
  assert ["last_weights_loss" in row for row in rows] == [False, True, True]
  assert rows[-1]["loss"] != rows[-1]["last_weights_loss"]


@pytest.mark.slow
def test_a_resumed_run_has_the_same_average(fields, tmp_path):
  tiny_run.train_here(tmp_path / "whole", fields)
  config = tiny_run.config(fields).with_vocab_size(257)
  unbroken = _state(tmp_path / "whole", config)
  part = tmp_path / "part"
  tiny_run.train_here(part, fields)
  _at(part, 5, config)
  (part / "summary.json").unlink()
  tiny_run.train_here(part, fields)
  compare.trees(_state(part, config), unbroken, 0)
