# SPDX-License-Identifier: Apache-2.0
"""Budgets that branch off a longer run end like separate runs."""

import json

import pytest

from attnres_jax import config as config_lib
from attnres_jax.scaling import grid
from attnres_jax.sweep import branches
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import state as state_lib
from attnres_jax.train import checkpoint
from attnres_jax.train import loop
from tests import tiny_run

FIELDS = {
  "model.residual.name": "prenorm",
  "data.batch_size": 8,
  "optim.schedule": "wsd",
  "optim.decay_fraction": 0.25,
  "train.eval_every": 10,
  "train.depth_every": 0,
  "checkpoint.every_steps": 5,
  "checkpoint.keep_last": 1,
  "checkpoint.keep_every": 15,
}


@pytest.fixture
def sweep(tmp_path):
  """A trunk of 40 steps and a branch of 20, whose decay starts at 15."""
  corpus = tiny_run.corpus(tmp_path)

  def resolve(overrides):
    fields = FIELDS | corpus | dict(overrides)
    return json.loads(config_lib.to_json(tiny_run.config(fields)))

  collector = grid.Sweep(resolve)
  trunk = collector.add(**{"train.steps": 40})
  collector.add(trunk, **{"train.steps": 20})
  return folder_lib.prepare(tmp_path / "sweep", collector.runs, "")


def _train(folder, run):
  return loop.train_and_evaluate(folder_lib.run_config(run), folder / run.name)


def test_branch_ends_like_a_separate_run(sweep, tmp_path):
  folder = tmp_path / "sweep"
  trunk, branch = sweep
  assert branch.branch_of == trunk.name
  # Nothing to branch from yet.
  assert not branches.is_ready(folder, branch)
  assert branches.start(folder, branch) == 0
  assert branches.is_ready(folder, trunk)

  with tiny_run.traced_once():
    _train(folder, trunk)
    assert branches.is_ready(folder, branch)
    assert branches.start(folder, branch) == 15
    assert checkpoint.all_steps(folder / branch.name) == [15]
    # It has begun: the trunk has no more to give.
    assert branches.start(folder, branch) == 0
    summary = _train(folder, branch)
    alone = tmp_path / "alone"
    loop.train_and_evaluate(folder_lib.run_config(branch), alone)

  assert summary["status"] == "finished" and summary["step"] == 20
  (event,) = tiny_run.events(folder / branch.name, "resume")
  assert (event["step"], event["lost_steps"]) == (15, 0)
  for split in ("train", "validation"):
    own = tiny_run.rows(folder / branch.name, split)
    whole = tiny_run.rows(alone, split)
    assert own == {step: row for step, row in whole.items() if step > 15}
  # The decay is its own: the trunk's rate is still at its peak there.
  rates = [
    tiny_run.rows(folder / run.name, "train")[20]["learning_rate"]
    for run in sweep
  ]
  assert rates[1] < 0.2 * rates[0]


def test_a_trunk_that_ended_is_not_waited_for(sweep, tmp_path):
  folder = tmp_path / "sweep"
  trunk, branch = sweep
  state_lib.write(folder / trunk.name, state_lib.State(status="failed"))
  assert branches.is_ready(folder, branch)
  assert branches.start(folder, branch) == 0


@pytest.mark.parametrize(
  "fields,cause",
  [
    ({"optim.peak_lr": 0.5}, "differs in optim.peak_lr"),
    ({"seed": 1}, "differs in seed"),
    ({"train.steps": 80}, "decays at an earlier step"),
  ],
)
def test_what_is_no_branch(sweep, tmp_path, fields, cause):
  trunk, branch = sweep
  config = folder_lib.run_config(branch)
  fields = FIELDS | tiny_run.corpus(tmp_path) | {"train.steps": 20} | fields
  other = tiny_run.config(fields)
  assert config_lib.differences(
    config_lib.to_dict(config), config_lib.to_dict(other)
  )
  run = grid.Run("other", {}, config_lib.to_dict(other), trunk.name)
  with pytest.raises(config_lib.ConfigError, match=f"other: not.*{cause}"):
    branches.check(trunk, run)
  branches.check(trunk, branch)
