# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters: the same function at first, trained alone, merged."""

import dataclasses

import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.common import sharding
from attnres_jax.common import trees
from attnres_jax.models import lora
from attnres_jax.train import checkpoint
from attnres_jax.train import train_state
from tests import tiny_network
from tests import tiny_run

TOKENS = np.random.default_rng(0).integers(0, 16, (2, 9), dtype=np.int32)


def _network(match="^sublayers/", **fields):
  lora = config_lib.LoraConfig(rank=2, alpha=3.0, match=match)
  return tiny_network.config(**tiny_network.KINDS | fields, lora=lora)


def _drawn(model):
  """With adapters that have an effect."""
  flat = trees.to_flat(model)
  rng = np.random.default_rng(1)
  for name, leaf in flat.items():
    if name.endswith("/lora_b/value"):
      flat[name] = jax.numpy.asarray(
        rng.standard_normal(leaf.shape, "float32") * np.float32(0.1)
      )
  return trees.from_flat(model, flat)


def test_the_sum_by_hand_of_any_matrix():
  config = _network("query$|moe/core/gate$|embedding/head$")
  model = _drawn(models.build_model(config))
  flat = trees.to_flat(model)
  merged = trees.to_flat(lora.merged(model))
  plain = dataclasses.replace(config, lora=config_lib.LoraConfig())
  assert merged.keys() == trees.to_flat(models.build_model(plain)).keys()
  # Each with a leading axis of sublayers; experts are a stack of matrices.
  for name, product in (
    ("sublayers/kda/core/query", "ldr,lrnh->ldnh"),
    ("sublayers/mla/core/query", "ldr,lrnh->ldnh"),
    ("sublayers/moe/core/gate", "ledr,lerf->ledf"),
    ("embedding/head", "dr,rv->dv"),
  ):
    down, up, weight = (
      flat[f"{name}/{p}/value"] for p in ("lora_a", "lora_b", "weight")
    )
    expected = weight + 3.0 / 2 * np.einsum(product, down, up)
    np.testing.assert_allclose(merged[f"{name}/value"], expected, atol=1e-6)
    assert np.abs(merged[f"{name}/value"] - weight).max() > 0.01
  adapted = [name for name in flat if name.endswith("/lora_a/value")]
  assert len(adapted) == 4


def test_the_same_function_at_first_and_merged():
  config = _network()
  plain = dataclasses.replace(config, lora=config_lib.LoraConfig())
  logits = jax.jit(lambda model: model(TOKENS))
  model = models.build_model(config)
  begins = logits(models.build_model(plain))
  np.testing.assert_array_equal(logits(model), begins)
  model = _drawn(model)
  found = logits(model)
  np.testing.assert_allclose(logits(lora.merged(model)), found, atol=1e-5)
  assert np.abs(found - begins).max() > 0.05


def test_a_pattern_without_a_matrix_lists_those_that_there_are():
  with pytest.raises(
    config_lib.ConfigError,
    match="lora.match: got 'no_such', expected .* embedding/table, ",
  ):
    models.build_model(_network("no_such"))
  with pytest.raises(
    config_lib.ConfigError, match="match: got '[(]', expected"
  ):
    config_lib.LoraConfig(match="(")


@pytest.mark.parametrize(
  "optimizer,match",
  [
    # That of docs/interop.md, which finds nothing in MLPs and experts.
    ("adamw", "core/(query|value)$"),
    pytest.param("muon", "core/(query|gate)$", marks=pytest.mark.slow),
  ],
)
def test_only_adapters_change_and_have_moments(optimizer, match):
  run = config_lib.RunConfig(
    model=_network(match, mixers=("attention",)),
    data=config_lib.DataConfig(sequence_length=8, batch_size=4),
    optim=config_lib.OptimConfig(
      name=optimizer, accumulate_steps=2, warmup_steps=0, peak_lr=0.01
    ),
    mesh=config_lib.MeshConfig(data=1, fsdp=2),
  )
  mesh = sharding.make_mesh(run.mesh)
  program = train_state.make_program(run, mesh)
  state = program.init_state()
  before = trees.to_flat(jax.device_get(state.model))
  size = sum(leaf.size for name, leaf in before.items() if "/lora_" in name)
  moments = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state))
  assert size <= moments <= 2 * size + 8
  tokens = np.concatenate([TOKENS, TOKENS])
  for _ in range(2):
    batch = sharding.shard_batch({"tokens": tokens}, mesh)
    state, metrics = program.train_step(state, batch)
  assert float(metrics["grad_norm"]) > 0
  after = trees.to_flat(jax.device_get(state.model))
  for name, leaf in before.items():
    changed = np.any(after[name] != leaf)
    assert changed == ("/lora_" in name), name


@pytest.mark.slow
def test_a_run_starts_from_another_resumes_and_loads_merged(tmp_path):
  short = {
    "train.eval_every": 0, "train.depth_every": 0, "data.segment_ids": True,
    "train.eval_batches": 1, "mesh.data": 1,
  }  # fmt: skip
  fields = tiny_run.corpus(tmp_path) | short
  base, one, two = (tmp_path / name for name in ("base", "one", "two"))
  tuned = short | {
    "data.sequence_length": 24, "train.start_from": str(base),
    "model.lora.rank": 2, "model.lora.match": "core/(query|down)$",
    "train.steps": 6, "checkpoint.every_steps": 3,
  }  # fmt: skip
  with tiny_run.traced_once():
    tiny_run.train_here(base, fields | {"train.steps": 5})
    tiny_run.train_here(one, tuned)
    tiny_run.train_here(two, tuned)
    tiny_run.rewind(two, 3)
    tiny_run.train_here(two, tuned)
  tiny_run.assert_same_run(one, two)
  config, merged = checkpoint.load_model(one)
  assert not config.model.lora.rank
  _, start = checkpoint.load_model(base)
  old, new = map(trees.to_flat, (start, merged))
  assert old.keys() == new.keys()
  for name, leaf in old.items():
    adapted = name.endswith(("core/query/value", "core/down/value"))
    assert np.any(new[name] != leaf) == adapted, name


def test_what_cannot_be_combined_is_refused():
  run = config_lib.RunConfig(
    model=_network(), optim=config_lib.OptimConfig(qk_clip=1.0)
  )
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=1))
  with pytest.raises(config_lib.ConfigError, match="lora.rank: got 2"):
    train_state.make_program(run, mesh)
