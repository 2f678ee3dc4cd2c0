# SPDX-License-Identifier: Apache-2.0
"""Plans are found by the fields that a step depends on."""

import dataclasses
import json
import types

import jax
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import plans
from attnres_jax.common import sharding
from attnres_jax.train import run_folder
from tests import tiny_run

DEVICES = [types.SimpleNamespace(device_kind="TPU v5")] * 4
OVERRIDES = {
  "mesh.data": 2,
  "mesh.fsdp": 1,
  "mesh.expert": 1,
  "optim.accumulate_steps": 2,
  "model.remat": "full",
}
BYTES = {"data.source": "stdlib"}
PLANNED = {"optim.accumulate_steps": 0}


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "plans.csv"
  facts = {"headroom_GiB": "1.0"}
  plans.put(tiny_run.config(BYTES), DEVICES, OVERRIDES, facts, path)
  return path


def _config(**fields):
  return tiny_run.config(BYTES | PLANNED | fields)


def test_a_plan_replaces_its_fields_alone(file):
  config = _config()
  planned = plans.resolve(config, DEVICES, file)
  changes = config_lib.differences(
    config_lib.to_dict(config), config_lib.to_dict(planned)
  )
  assert {name: new for name, (_, new) in changes.items()} == {
    name: value for name, value in OVERRIDES.items() if value != 1
  }
  given = tiny_run.config(BYTES)
  assert plans.resolve(given, DEVICES, file) is given


@pytest.mark.parametrize(
  "fields,same",
  [({"seed": 1, "optim.peak_lr": 0.1, "train.steps": 7, "name": "b"}, True),
   ({"model.remat": "dots"}, True), ({"model.width": 32}, False),
   ({"data.batch_size": 8}, False), ({"optim.name": "muon"}, False)],
)  # fmt: skip
def test_a_plan_belongs_to_what_its_step_depends_on(file, fields, same):
  row = plans.find(_config(**fields), DEVICES, file)
  assert (row is not None) == same


def test_fields_at_their_defaults_do_not_matter(file, monkeypatch):
  row = plans.find(_config(), DEVICES, file)
  to_dict = config_lib.to_dict

  def later(config):
    return to_dict(config) | {"model": to_dict(config)["model"] | {"new": 0}}

  monkeypatch.setattr(config_lib, "to_dict", later)
  assert row is not None and row == plans.find(_config(), DEVICES, file)


def test_a_file_that_is_no_file_of_plans(tmp_path):
  (tmp_path / "loop").symlink_to("loop")
  (tmp_path / "folder").mkdir()
  (tmp_path / "bytes").write_bytes(b"\xff\xfe\0")
  (tmp_path / "words").write_text("hello")
  (tmp_path / "others.csv").write_text("a,b\n1,2\n")
  for name in ("loop", "folder", "bytes", "words", "others.csv"):
    with pytest.raises(config_lib.ConfigError, match="^--plans: got"):
      plans.resolve(_config(), DEVICES, tmp_path / name)
  (tmp_path / "empty.csv").touch()
  for name in ("empty.csv", "new.csv"):
    assert plans.rows(tmp_path / name) == []


@pytest.mark.parametrize("field", plans.COLUMNS.values())
def test_a_run_may_resume_with_another_plan(field):
  """Such as that of another slice."""
  assert run_folder.is_harmless(field) and "step" in config_lib.affects(field)


def test_without_a_plan(file, tmp_path):
  other = [types.SimpleNamespace(device_kind="TPU v6 lite")] * 4
  slices = [
    types.SimpleNamespace(device_kind="TPU v5", slice_index=i) for i in range(4)
  ]
  for devices, path in (
    (DEVICES[:2], file), (other, file), (slices, file),
    (DEVICES, tmp_path / "none.csv"),
  ):  # fmt: skip
    with pytest.raises(config_lib.ConfigError) as error:
      plans.resolve(_config(), devices, path)
    (line,) = str(error.value).splitlines()
    assert "config.optim.accumulate_steps: got 0" in line
    assert "python -m attnres_jax.plan.search" in line and str(path) in line


def test_a_plan_has_the_mesh(file):
  with pytest.raises(config_lib.ConfigError, match="mesh of your own"):
    plans.resolve(_config(**{"mesh.fsdp": 2}), DEVICES, file)


@pytest.mark.more
def test_a_run_takes_its_plan(tmp_path):
  fields = tiny_run.corpus(tmp_path) | PLANNED
  fields |= {"train.steps": 2, "optim.warmup_steps": 0, "data.batch_size": 16}
  fields["train.depth_every"] = 0
  path = tmp_path / "plans.csv"
  config = tiny_run.config(fields)
  plans.put(config, jax.devices(), OVERRIDES | {"mesh.data": 8}, {}, path)
  folder = tmp_path / "sweep"
  folder.mkdir()
  plans.copy(path, folder)
  run = folder / "run"
  tiny_run.train_here(run, fields, plans=folder / plans.COPY)
  saved = json.loads((run / "config.json").read_text())
  assert saved["optim"]["accumulate_steps"] == 2
  assert saved["mesh"]["data"] == 8 and saved["model"]["remat"] == "full"


def test_a_step_needs_a_number():
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=1))
  with pytest.raises(config_lib.ConfigError, match="a number, or a plan"):
    sharding.check_divides(_config(), mesh)


def test_a_plan_may_be_a_pipeline(file):
  more = OVERRIDES | {
    "mesh.data": 1,
    "mesh.stage": 2,
    "pipeline.microbatches": 4,
    "pipeline.virtual_stages": 2,
    "pipeline.gather": "step",
    "optim.accumulate_steps": 1,
  }
  plain = tiny_run.config(BYTES | {"model.width": 32})
  plans.put(plain, DEVICES, OVERRIDES, {}, file)
  plans.put(_config(), DEVICES, more, {}, file)
  # The fixture's plan is replaced.
  assert len(file.read_text().splitlines()) == 3
  planned = plans.resolve(_config(), DEVICES, file)
  assert planned.mesh.stage == 2 and planned.pipeline == dataclasses.replace(
    _config().pipeline, virtual_stages=2, microbatches=4, gather="step"
  )
  other = plans.resolve(_config(**{"model.width": 32}), DEVICES, file)
  assert other.mesh.stage == 1 and other.pipeline == _config().pipeline
  # What a plan replaces does not matter; what it keeps does.
  given = _config(**{"pipeline.microbatches": 8})
  assert plans.find(given, DEVICES, file) == plans.find(
    _config(), DEVICES, file
  )
  rule = _config(**{"pipeline.rule": "naive"})
  assert plans.find(rule, DEVICES, file) is None


def test_a_plan_of_another_scheme_is_that_of_the_same_network(file):
  residual = config_lib.under(_config().model.residual, "prenorm")
  prenorm = plans.apply(_config(), {"model.residual": residual})
  schemes = ("block_attnres", "prenorm")
  overrides = plans.under_other_schemes(prenorm, DEVICES, schemes, file)
  assert overrides == OVERRIDES
  wider = plans.apply(prenorm, {"model.width": 32})
  for config, of in ((_config(), schemes), (wider, schemes),
                        (prenorm, schemes[1:])):  # fmt: skip
    assert plans.under_other_schemes(config, DEVICES, of, file) is None
