# SPDX-License-Identifier: Apache-2.0
"""The folder of a sweep: its files, and runs that it refuses."""

import json
import shutil

import pytest

from attnres_jax import config as config_lib
from attnres_jax.scaling import grid
from attnres_jax.sweep import folder
from tests.sweep import tiny_sweep


@pytest.fixture
def source(tmp_path):
  return tiny_sweep.write(tmp_path / "tiny.py", seeds=(0, 1, 2))


def test_runs_come_back_as_they_were_described(tmp_path, source):
  runs = tiny_sweep.prepare(tmp_path / "sweep", source)
  assert [run.overrides for run in runs] == [{"seed": i} for i in range(3)]
  assert [run.name for run in folder.read(tmp_path / "sweep")] == [
    run.name for run in runs
  ]
  for run, described in zip(folder.read(tmp_path / "sweep"), grid.load(source)):
    config = folder.run_config(run)
    assert config.name == run.name == described.name
    assert config.seed == run.overrides["seed"]
    # The name is made of what is trained.
    assert run.name.endswith(grid.config_hash(run.config))
  assert folder.source(tmp_path / "sweep") == source


def test_prepared_again_with_more_runs(tmp_path, source):
  first = tiny_sweep.prepare(tmp_path / "sweep", source)
  marker = tmp_path / "sweep" / first[0].name / "metrics.jsonl"
  marker.write_text("kept")
  more = tiny_sweep.write(tmp_path / "tiny.py", seeds=(0, 1, 2, 3))
  second = tiny_sweep.prepare(tmp_path / "sweep", more)
  assert second[:3] == folder.read(tmp_path / "sweep")[:3]
  assert [run.name for run in second[:3]] == [run.name for run in first]
  assert len(folder.read(tmp_path / "sweep")) == 4
  assert marker.read_text() == "kept"
  # Fewer runs take none away.
  fewer = tiny_sweep.write(tmp_path / "tiny.py", seeds=(3,))
  assert len(tiny_sweep.prepare(tmp_path / "sweep", fewer)) == 1
  assert len(folder.read(tmp_path / "sweep")) == 4


def test_changed_config_is_refused_with_the_difference(tmp_path, source):
  tiny_sweep.prepare(tmp_path / "sweep", source)
  changed = tiny_sweep.write(
    tmp_path / "tiny.py", seeds=(0, 1, 2), **{"optim.peak_lr": 0.5}
  )
  with pytest.raises(config_lib.ConfigError) as caught:
    tiny_sweep.prepare(tmp_path / "sweep", changed)
  lines = str(caught.value).splitlines()
  assert "seed0-" in lines[0] and "another configuration" in lines[0]
  assert lines[1:] == ["  config.optim.peak_lr: 0.001 there, 0.5 here"]
  # Nothing was written.
  assert len(list((tmp_path / "sweep").glob("seed0-*"))) == 1


def test_a_field_that_is_new_since_then_changes_nothing(tmp_path, source):
  before = tiny_sweep.prepare(tmp_path / "sweep", source)
  path = tmp_path / "sweep" / before[1].name / folder.RUN
  values = json.loads(path.read_text())
  del values["config"]["loss"]["z_loss"]
  path.write_text(json.dumps(values))
  again = tiny_sweep.prepare(tmp_path / "sweep", source)
  assert [run.name for run in again] == [run.name for run in before]
  assert folder.run_config(again[1]) == folder.run_config(before[1])


def test_a_damaged_description_is_written_again(tmp_path, source):
  """Whatever it says: a name has the hash of the config."""
  runs = tiny_sweep.prepare(tmp_path / "sweep", source)
  path = tmp_path / "sweep" / runs[1].name / folder.RUN
  before = path.read_text()
  for change in (
    lambda values: values["config"].update(seed=0),
    lambda values: values["overrides"].update(seed=0),
    lambda values: values["config"].pop("optim"),
    lambda values: values.clear(),
  ):
    values = json.loads(before)
    change(values)
    path.write_text(json.dumps(values))
    assert tiny_sweep.prepare(tmp_path / "sweep", source) == runs
    assert path.read_text() == before


def test_what_computes_the_same_may_change(tmp_path, source):
  before = tiny_sweep.prepare(tmp_path / "sweep", source)
  fields = {"mesh.data": 1, "mesh.fsdp": -1, "checkpoint.every_steps": 7}
  other = tiny_sweep.write(tmp_path / "tiny.py", seeds=(0, 1, 2), **fields)
  after = tiny_sweep.prepare(tmp_path / "sweep", other)
  assert [run.name for run in after] == [run.name for run in before]
  assert len(list((tmp_path / "sweep").glob("seed0-*"))) == 1
  config = folder.run_config(folder.read(tmp_path / "sweep")[0])
  assert (config.mesh.data, config.mesh.fsdp) == (1, -1)
  assert config.checkpoint.every_steps == 7


def test_unknown_run_and_empty_folder(tmp_path):
  assert folder.read(tmp_path) == []
  with pytest.raises(config_lib.ConfigError, match="^got run 'nix'"):
    folder.read_run(tmp_path, "nix")


def test_a_folder_that_was_removed_is_created_again(tmp_path, source):
  _, gone, _ = before = tiny_sweep.prepare(tmp_path / "sweep", source)
  shutil.rmtree(tmp_path / "sweep" / gone.name)
  with pytest.raises(
    config_lib.ConfigError, match=f"{gone.name}.*launch again"
  ):
    folder.read(tmp_path / "sweep")
  assert tiny_sweep.prepare(tmp_path / "sweep", source) == before
  assert folder.read(tmp_path / "sweep") == before
