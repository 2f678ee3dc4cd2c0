# SPDX-License-Identifier: Apache-2.0
"""Plans fit the slice they are compiled for, and flags of them train."""

import dataclasses
import math

import jax
import pytest

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.common import plans
from attnres_jax.common import topology
from attnres_jax.models import trunk
from attnres_jax.plan import candidates
from attnres_jax.plan import cost
from attnres_jax.plan import search as plan_lib
from tests.plan import small

pytestmark = pytest.mark.needs("libtpu")
REMAT = ("none", "dots", "attention", "full")


def _config(**fields):
  return small.config(**{"model.width": 256, "train.steps": 3600} | fields)


@pytest.fixture(scope="module")
def devices():
  return topology.devices("v5e:2x2")


def test_every_plan_is_a_config_of_all_devices(devices):
  config = _config()
  offered, dropped = candidates.plans(config, devices)
  assert not dropped
  # Two rows a device in one or two microbatches, fsdp of 1 or 2.
  meshes = {tuple(plan.overrides.values())[:3] for plan in offered}
  assert meshes == {(4, 1, 1), (2, 2, 1)}
  assert len(offered) == len(meshes) * 2 * len(trunk.REMAT)
  for plan in offered:
    applied = plan.apply(config)
    mesh = applied.mesh
    assert mesh.data * mesh.fsdp * mesh.expert == 4
    assert applied.model.remat == plan.overrides["model.remat"]
    assert dataclasses.replace(
      applied, mesh=config.mesh, optim=config.optim, model=config.model
    ) == config  # fmt: skip


def test_cuts_of_less_than_a_tile_are_not_tried(devices):
  """The width of 160 can be cut in two, but the halves are less than 128."""
  narrow, _ = candidates.plans(_config(**{"model.width": 160}), devices)
  assert {plan.overrides["mesh.fsdp"] for plan in narrow} == {1}


def test_order(devices):
  """Each rule decides between plans that the rules before it leave equal."""
  offered, _ = candidates.plans(_config(), devices)
  first = offered[0].overrides
  assert (first["model.remat"], first["optim.accumulate_steps"]) == ("none", 1)
  places = {tuple(plan.overrides.values()): i for i, plan in enumerate(offered)}
  place = lambda fsdp, steps, remat: places[4 // fsdp, fsdp, 1, steps, remat]
  for fsdp in (1, 2):
    for steps in (1, 2):
      same = [place(fsdp, steps, remat) for remat in REMAT]
      assert same == sorted(same)
    for remat in REMAT:
      assert place(fsdp, 1, remat) < place(fsdp, 2, remat)
  # A sum of gradients, or parts of weights in every pass as well.
  assert place(1, 1, "none") < place(2, 1, "none")


def test_ragged_cuts_come_later(devices):
  """Halves of 136 columns are no whole tiles."""

  def fewest_steps(width):
    offered, _ = candidates.plans(_config(**{"model.width": width}), devices)
    return [
      (plan.overrides["mesh.fsdp"], plan.overrides["optim.accumulate_steps"])
      for plan in offered
      if plan.overrides["model.remat"] == "none"
    ]

  assert fewest_steps(256) == [(1, 1), (2, 1), (1, 2), (2, 2)]
  assert fewest_steps(272) == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_plans_that_keep_most_of_the_memory_come_last(devices):
  """Even if less is computed again; of two, the one that keeps less first."""
  config = _config(**{"model.width": 2048, "data.sequence_length": 16384})
  offered, _ = candidates.plans(config, devices)
  memory = topology.chip(devices[0]).hbm_bytes
  shares = [plan.kept_bytes / memory for plan in offered]
  large = [share for share in shares if share > 0.75]
  assert 0 < len(large) < len(offered)
  assert shares[-len(large) :] == sorted(large)
  remats = [plan.overrides["model.remat"] for plan in offered]
  assert remats[-len(large) - 1] != "none" and "none" in remats[-len(large) :]


def test_plans_do_not_depend_on_what_they_replace(devices):
  plain, _ = candidates.plans(_config(), devices)
  fields = {"optim.accumulate_steps": 4, "model.remat": "dots", "mesh.data": 4}
  other, _ = candidates.plans(_config(**fields), devices)
  assert other == plain


def test_an_average_of_the_weights_is_kept(devices):
  plain, averaged = (
    candidates.plans(_config(**{"train.average_last": share}), devices)[0]
    for share in (0.0, 0.5)
  )
  state = jax.eval_shape(lambda: models.build_model(_config().model))
  average = 4 * sum(leaf.size for leaf in jax.tree.leaves(state))
  for plan, other in zip(plain, averaged, strict=True):
    assert plan.overrides == other.overrides
    more = (other.kept_bytes - plan.kept_bytes) * plan.overrides["mesh.fsdp"]
    assert more == pytest.approx(average, rel=0.1)


@pytest.mark.parametrize(
  "fields,tile",
  [({}, None), ({"model.vocab_size": 163_840}, 1024),
   ({"model.vocab_size": 20_480}, 8192),
   ({"model.vocab_size": 40_960}, None),  # As without a plan.
   ({"model.vocab_size": 163_840, "loss.tile_tokens": 512}, None)],
)  # fmt: skip
def test_logits_of_a_tile_take_a_tenth_of_the_memory(devices, fields, tile):
  offered, _ = candidates.plans(_config(**fields), devices)
  assert {p.overrides.get("loss.tile_tokens") for p in offered} == {tile}
  if tile:
    # float32, and bfloat16 or float32 again, of 16 GiB.
    logits = tile * fields["model.vocab_size"] * (4 + 4)
    assert 0.05 < logits / 2**34 < 0.1


def test_what_cannot_fit_is_dropped_with_its_reason(devices):
  config = _config(**{"model.width": 8192, "model.mlp_width": 131_072})
  offered, dropped = candidates.plans(config, devices)
  assert not offered and list(dropped) == ["more than 16 GiB by arithmetic"]


def test_of_what_tensor_cuts_a_device_holds_its_part(devices):
  """3.8e9 parameters: over four devices, 14 GiB of state and gradient."""
  config = _config(**{
    "model.width": 8192, "model.mlp_width": 65_536, "mesh.tensor": 4,
  })  # fmt: skip
  offered, _ = candidates.plans(config, devices)
  assert offered


def test_pipelines_are_not_planned(devices):
  with pytest.raises(config_lib.ConfigError, match=r"mesh\.stage: got 2"):
    candidates.plans(_config(**{"mesh.stage": 2}), devices)


def test_a_compiled_plan(devices):
  config = _config()
  best = candidates.plans(config, devices)[0][0]
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


@pytest.fixture
def compiled(monkeypatch):
  """Overrides that were compiled, and those that do not fit."""
  tried, misfits = [], []

  def compiled(config, overrides, slice_name, num_slices=1):
    tried.append(dict(overrides))
    numbers = dict.fromkeys(
      ("peak_bytes", "headroom_bytes", "step_seconds", "compute_seconds",
       "memory_seconds", "link_seconds", "tokens_per_second", "hours",
       "model_flop_utilisation", "chip_hours", "compile_seconds"),
      float(len(tried)),
    ) | {"hbm_bytes": 1.0}  # fmt: skip
    fits = overrides not in misfits
    return dict(overrides=overrides, fits=fits, bound="memory") | numbers

  monkeypatch.setattr(plan_lib, "compiled", compiled)
  return tried, misfits


def test_a_step_of_a_sweep_is_planned_once(compiled, tmp_path, capsys):
  tried, _ = compiled
  source = tmp_path / "sweep.py"
  source.write_text("""
from configs import lm

def get_config(arg=None):
  return lm.get_config("size=tiny")

def sweep(add):
  for seed in (0, 1):
    for width in (128, 256):
      add(**{"seed": seed, "model.width": width, "model.vocab_size": 257})
""")
  args = [f"--config={source}", f"--plans={tmp_path / 'plans.csv'}", "--sweep"]
  args += ["--topology=v5e:2x2", "--tries=1", "--save"]
  assert plan_lib.main([*args, "--only=128"]) == 0
  assert len(tried) == 1
  assert plan_lib.main(args) == 0
  assert len(tried) == 2
  assert capsys.readouterr().out.count("1 of 1:") == 2
  assert plan_lib.main(args) == 0
  assert len(tried) == 2
  assert "has all plans" in capsys.readouterr().out


def test_a_plan_is_compiled_again_as_it_is(compiled, tmp_path, monkeypatch):
  """Only if another commit, jax or libtpu has compiled it.

  If it no longer fits, another one takes its place.
  """
  file, (tried, misfits) = tmp_path / "plans.csv", compiled
  args = ["--config=configs/lm.py:size=tiny", "--topology=v5e:2x2"]
  args += ["--config.model.vocab_size=257", f"--plans={file}"]
  now = {}
  monkeypatch.setattr(plan_lib.environment, "commit", lambda: now["commit"])
  for now["commit"], flags, runs in (
    ("first", ["--save", "--tries=2"], 2), ("first", ["--again"], 0),
    ("second", ["--again"], 1), ("second", ["--again"], 0),
  ):  # fmt: skip
    before = len(tried)
    assert plan_lib.main([*args, *flags]) == 0
    assert len(tried) - before == runs
  (row,) = plans.rows(file)
  assert tried[2] == tried[0] == plans.overrides_of(row)
  assert (row["commit"], row["tries"]) == ("second", "2")
  assert row["step_seconds"] == "3.000"
  misfits.append(plans.overrides_of(row))
  now["commit"] = "third"
  assert plan_lib.main([*args, "--again", "--tries=1"]) == 0
  (row,) = plans.rows(file)
  assert plans.overrides_of(row) not in misfits
  assert tried.count(misfits[0]) == 3  # Not once more after it failed.
  assert (row["commit"], row["step_seconds"]) == ("third", "5.000")


@pytest.mark.parametrize("least,best", ((1, 1), (2, 2), (3, 4), (8, 8)))
def test_the_fastest_plan_gets_ever_fewer_microbatches(
  least, best, tmp_path, monkeypatch
):
  """Until less than a twentieth of the memory would be left."""

  def plan(microbatches, remat="none"):
    return {
      "mesh.data": 4, "mesh.fsdp": 1, "mesh.expert": 1,
      "optim.accumulate_steps": microbatches, "model.remat": remat,
      "loss.tile_tokens": 1024 // microbatches,
    }  # fmt: skip

  def compiled(config, overrides, slice_name, num_slices):
    steps = overrides["optim.accumulate_steps"]
    seconds = steps + 4 * (overrides["model.remat"] == "full")
    names = (
      "peak_bytes", "compute_seconds", "memory_seconds", "link_seconds",
      "tokens_per_second", "hours", "model_flop_utilisation", "chip_hours",
      "compile_seconds",
    )  # fmt: skip
    return dict.fromkeys(names, 1.0) | dict(
      overrides=overrides, fits=True, bound="memory", step_seconds=seconds,
      hbm_bytes=100, headroom_bytes=4 if steps < least else 5,
    )  # fmt: skip

  offered = [plan(8), plan(8, "full"), plan(1, "full"), *map(plan, (1, 2, 4))]
  monkeypatch.setattr(plan_lib, "compiled", compiled)
  monkeypatch.setattr(plan_lib, "_candidates", lambda *args: offered)
  argv = ["--config=configs/lm.py:size=tiny", "--topology=v5e:2x2", "--save"]
  argv += ["--tries=2", f"--plans={tmp_path / 'plans.csv'}"]
  assert plan_lib.main([*argv, "--config.model.vocab_size=257"]) == 0
  (row,) = plans.rows(tmp_path / "plans.csv")
  assert plans.overrides_of(row) == plan(best)


@pytest.mark.slow
def test_meshes_of_two_slices():
  offered, _ = candidates.plans(_config(), topology.devices("v5e:2x2", 2))
  meshes = {tuple(plan.overrides.values())[:3] for plan in offered}
  assert meshes == {(8, 1, 1), (4, 2, 1)}


@pytest.mark.slow
def test_a_compiled_plan_for_two_slices():
  """Only mesh.data crosses slices, with a sum of what fsdp keeps apart."""
  config = _config()
  fields = {"mesh.data": 4, "mesh.fsdp": 2, "mesh.expert": 1}
  fields |= {"optim.accumulate_steps": 1, "model.remat": "none"}
  row = plan_lib.compiled(config, fields, "v5e:2x2", 2)
  assert row["fits"] and row["chip_hours"] == pytest.approx(8 * row["hours"])
  state = jax.eval_shape(lambda: models.build_model(config.model))
  gradient = 4 * sum(leaf.size for leaf in jax.tree.leaves(state)) / 2
  assert 0.75 * gradient < row["bytes_between_slices"] < 1.1 * gradient
  assert "mesh.data crosses the slices" in plan_lib.to_text([row])


def test_time_of_what_is_not_overlapped_is_added():
  chip = dataclasses.replace(
    topology.chip(topology.devices("v5e:2x2")[0]), link_bytes_per_second=10.0
  )
  work = dict(compute_seconds=3.0, memory_seconds=4.0, link_seconds=5.0)
  for exposed, seconds in ((0.0, 5.0), (10.0, 5.0), (50.0, 9.0)):
    actual = cost.step_seconds(work | dict(exposed_bytes=exposed), chip)
    assert math.isclose(actual, seconds)
  work |= dict(lockstep=dict(seconds=20.0), exposed_bytes=10.0)
  actual = cost.step_seconds(work, chip)
  assert math.isclose(actual, 21.0)
