# SPDX-License-Identifier: Apache-2.0
"""A seed that is trained with others is the run that it is alone."""

import dataclasses
import json
import re

import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.scaling import grid
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import launchers
from attnres_jax.sweep import monitor
from attnres_jax.sweep import state as state_lib
from attnres_jax.train import loop
from attnres_jax.train import metrics
from attnres_jax.train import together
from tests import tiny_run

SEEDS = (3, 5)
SCHEMES = ("prenorm", "block_attnres")
# A batch for the eight devices of a run by itself.
FIELDS = {
  "train.steps": 8, "train.log_every": 2, "train.eval_every": 0,
  "train.depth_every": 0, "checkpoint.every_steps": 0, "data.batch_size": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Two schemes with two seeds each, in a folder's sweep."""
  fields = (
    tiny_run.FIELDS | FIELDS | tiny_run.corpus(tmp_path_factory.getbasetemp())
  )

  def resolve(overrides):
    given = fields | {
      "model.residual.name": overrides["residual"],
      "seed": overrides["seed"], "data.seed": overrides["data.seed"],
    }  # fmt: skip
    config = config_lib.load_config(tiny_run.SPEC, given, by_hand=False)
    return config_lib.to_dict(config)

  return grid.collect(grid.of_axes({"residual": SCHEMES}, SEEDS), resolve)


@pytest.fixture(scope="module")
def ordinary(runs, tmp_path_factory):
  """Metrics of the same runs, each trained by itself."""
  folder = tmp_path_factory.mktemp("alone")
  for run in runs:
    loop.train_and_evaluate(folder_lib.run_config(run), folder / run.name)
  return {run.name: metrics.read_rows(folder / run.name) for run in runs}


def _numbers(rows, split):
  names = "loss", "grad_norm", "learning_rate", "tokens", "param_norm"
  return np.array([
    [row["step"], *(row[name] for name in names if name in row)]
    for row in rows
    if row["split"] == split
  ])  # fmt: skip


def _assert_same(folder, ordinary):
  for name, rows in ordinary.items():
    here = metrics.read_rows(folder / name)
    for split in ("train", "validation"):
      expected = _numbers(rows, split)
      assert len(expected)
      np.testing.assert_allclose(
        _numbers(here, split), expected, rtol=1e-5, atol=1e-6
      )


def test_a_seed_equals_its_ordinary_run(runs, ordinary, tmp_path, capfd):
  losses = [_numbers(rows, "train")[-1, 1] for rows in ordinary.values()]
  assert len(set(losses)) == len(runs), "runs that differ"
  folder_lib.prepare(tmp_path, runs, "here")
  # One thread, so that PreNorm is never behind where Block is compared.
  options = launchers.Options(settings={"threads": "1"})
  assert launchers.launch("together", runs, tmp_path, options) == 0
  _assert_same(tmp_path, ordinary)
  progress = monitor.of_folder(tmp_path)
  assert {run.status for run in progress} == {state_lib.DONE}
  assert [row["run"] for row in monitor.rows(progress)] == [
    r.name for r in runs
  ]
  out = capfd.readouterr().out
  assert "2 arms, 4 runs" in out and "compiled in" in out
  gap = re.search(r"Block AttnRes +step +8/8 .* minus PreNorm (\S+) ±", out)
  last = [
    np.mean([_numbers(ordinary[r.name], "train")[-1, 1] for r in runs
             if r.overrides["residual"] == scheme])
    for scheme in SCHEMES
  ]  # fmt: skip
  assert float(gap[1]) == pytest.approx(last[1] - last[0], abs=6e-4)
  # Of the group, each run has its share.
  spent = sum(run.seconds for run in progress)
  assert (
    0 < spent == pytest.approx(sum(run.chip_hours for run in progress) * 3600)
  )


def _trained(runs, folder, steps):
  """A group of runs that has taken so many steps."""
  configs = [folder_lib.run_config(run) for run in runs]
  workdirs = [folder / run.name for run in runs]
  group = together.Group(configs, workdirs, together.Batches())
  group.compile_train()
  while group.step < steps:
    group.advance()
  return group


@pytest.mark.more
def test_groups_resume_where_they_were_stopped(runs, ordinary, tmp_path):
  folder_lib.prepare(tmp_path, runs, "here")
  for scheme, steps in zip(SCHEMES, (4, 2)):
    same = [run for run in runs if run.overrides["residual"] == scheme]
    group = _trained(same, tmp_path, steps)
    group.save()
    group.close()
  assert launchers.launch("together", runs, tmp_path, launchers.Options()) == 0
  _assert_same(tmp_path, ordinary)
  rows = metrics.read_rows(tmp_path / runs[0].name)
  events = [row["event"] for row in rows if row["split"] == "event"]
  assert events[0] == "start" and "resume" in events


def test_a_killed_process_loses_the_steps_since_its_last_save(
  runs, ordinary, tmp_path
):
  """Nothing is closed, as after a kill -9 beyond the save at step 4."""
  saved = [
    dataclasses.replace(
      run, config=run.config | {"checkpoint": run.config["checkpoint"] | {
        "every_steps": 4}},
    )
    for run in runs if run.overrides["residual"] == SCHEMES[0]
  ]  # fmt: skip
  folder_lib.prepare(tmp_path, saved, "here")
  group = _trained(saved, tmp_path, 6)
  assert launchers.launch("together", saved, tmp_path, launchers.Options()) == 0
  _assert_same(tmp_path, {run.name: ordinary[run.name] for run in saved})
  rows = metrics.read_rows(tmp_path / saved[0].name)
  (resume,) = [row for row in rows if row.get("event") == "resume"]
  assert resume["step"] == 4 and resume["lost_steps"] == 2
  group.close()


def test_a_seed_that_diverges_leaves_the_others(
  runs, ordinary, tmp_path, monkeypatch
):
  folder_lib.prepare(tmp_path, runs, "here")
  train = together.Batches.train

  def spoil(self, configs, start, stop):
    batches = train(self, configs, start, stop)
    if start == 4 and configs[0].model.residual.name == "prenorm":
      # No token counts for the first seed: its loss is 0 / 1, its rows differ.
      batches["counts"][:, 0] = 0
    return batches

  def refuse(self, step, metrics):
    if not metrics["tokens"]:
      raise together.step_log.NonFiniteError(step, "loss is nan")

  monkeypatch.setattr(together.Batches, "train", spoil)
  monkeypatch.setattr(together.step_log.StepLog, "_check_finite", refuse)
  assert launchers.launch("together", runs, tmp_path, launchers.Options()) == 1
  progress = monitor.of_folder(tmp_path)
  statuses = [run.status for run in progress]
  assert statuses == [state_lib.DIVERGED, *[state_lib.DONE] * 3]
  assert "loss is nan" in progress[0].error
  last = runs[2].name
  _assert_same(tmp_path, {last: ordinary[last]})


def test_what_cannot_be_trained_together_is_refused(runs, tmp_path):
  config = folder_lib.run_config(runs[0])
  for field, value in (("depth_every", 2), ("log_every", 3)):
    changed = json.loads(config_lib.to_json(config))
    changed["train"][field] = value
    with pytest.raises(config_lib.ConfigError, match=f"train.{field}"):
      together.Group(
        [config_lib.build_run_config(changed)], [tmp_path], together.Batches()
      )
