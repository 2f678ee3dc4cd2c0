# SPDX-License-Identifier: Apache-2.0
"""Plans fit the slice they are compiled for, and flags of them train."""

import dataclasses
import math

import pytest

from attnres_jax import config as config_lib
from attnres_jax.aot import plan as plan_lib
from attnres_jax.aot import topology
from attnres_jax.models import stack
from tests.aot import small

pytestmark = pytest.mark.needs("libtpu")


def _config(**fields):
  return small.config(**{"model.width": 256, "train.steps": 3600} | fields)


@pytest.fixture(scope="module")
def devices():
  return topology.devices("v5e:2x2")


def test_every_plan_is_a_config_of_all_devices(devices):
  config = _config()
  found, dropped = plan_lib.plans(config, devices)
  assert not dropped
  times = [plan.rough_seconds for plan in found]
  assert times == sorted(times) and times[0] > 0
  # Two rows a device in one or two microbatches, fsdp of 1 or 2 in whole tiles.
  meshes = {tuple(plan.overrides.values())[:3] for plan in found}
  assert meshes == {(4, 1, 1), (2, 2, 1)}
  assert len(found) == len(meshes) * 2 * len(stack.REMAT)
  for plan in found:
    applied = plan.apply(config)
    mesh = applied.mesh
    assert mesh.data * mesh.fsdp * mesh.expert == 4
    assert applied.model.remat == plan.overrides["model.remat"]
    assert dataclasses.replace(
      applied, mesh=config.mesh, optim=config.optim, model=config.model
    ) == config  # fmt: skip


def test_plans_do_not_depend_on_what_they_replace(devices):
  plain, _ = plan_lib.plans(_config(), devices)
  fields = {"optim.accumulate_steps": 4, "model.remat": "dots", "mesh.data": 4}
  other, _ = plan_lib.plans(_config(**fields), devices)
  assert other == plain


def test_what_cannot_fit_is_dropped_with_its_reason(devices):
  config = _config(**{"model.width": 8192, "model.mlp_width": 131_072})
  found, dropped = plan_lib.plans(config, devices)
  assert not found and list(dropped) == ["more than 16 GiB by arithmetic"]


def test_pipelines_are_refused(devices):
  with pytest.raises(config_lib.ConfigError, match=r"mesh\.stage: got 2"):
    plan_lib.plans(_config(**{"mesh.stage": 2}), devices)


def test_a_compiled_plan(devices):
  config = _config()
  best = plan_lib.plans(config, devices)[0][0]
  row = plan_lib.compiled(config, best.overrides, "v5e:2x2")
  assert row["fits"] and row["peak_bytes"] < 2**30
  # About what the arithmetic counts, which allows for more activations than so
  # small a network has. Neither contains the program itself.
  assert 0.25 < row["peak_bytes"] / best.kept_bytes < 4
  seconds = row["step_seconds"]
  assert seconds >= max(row["compute_seconds"], row["memory_seconds"])
  assert row["hours"] == pytest.approx(seconds)
  assert row["chip_hours"] == pytest.approx(4 * seconds)
  assert row["tokens_per_second"] == pytest.approx(8 * 256 / seconds)
  text = plan_lib.to_text([row])
  assert "--config.mesh.data=4" in text and "chip-hours" in text
  misfit = row | dict(fits=False, step_seconds=None)
  assert "--config" not in plan_lib.to_text([misfit])


def test_time_of_what_is_not_overlapped_is_added():
  chip = dataclasses.replace(
    topology.chip(topology.devices("v5e:2x2")[0]), link_bytes_per_second=10.0
  )
  work = dict(compute_seconds=3.0, memory_seconds=4.0, link_seconds=5.0)
  sent = dict(sent_bytes=50.0)
  for hidden, seconds in ((50.0, 5.0), (40.0, 5.0), (0.0, 9.0)):
    rows = [sent | dict(overlapped_bytes=hidden)]
    found = plan_lib.step_seconds(work | dict(collectives=rows), chip)
    assert math.isclose(found, seconds)
