# SPDX-License-Identifier: Apache-2.0
"""The recipes of docs/extend.md and docs/architecture.md, executed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import flops
from attnres_jax.analysis import figures
from attnres_jax.common import sharding
from attnres_jax.models import residuals
from attnres_jax.models import sublayer
from attnres_jax.models.residuals import definition
from attnres_jax.train import train_state
from tests import tiny_network
from tests import tiny_run


def _run(page, heading, **names):
  """Executes the Python blocks of a section, one after the other."""
  text = (tiny_run.ROOT / "docs" / page).read_text()
  section = text.partition(f"## {heading}\n")[2]
  section = re.split(r"^##", section, maxsplit=1, flags=re.M)[0]
  blocks = re.findall(r"^```python\n(.*?)^```$", section, re.S | re.M)
  assert blocks, heading
  for block in blocks:
    exec(block, names)


@pytest.fixture
def registries(monkeypatch):
  monkeypatch.setattr(residuals, "RESIDUALS", dict(residuals.RESIDUALS))
  monkeypatch.setattr(sublayer, "CORES", dict(sublayer.CORES))


def test_a_scheme_and_a_mixer_train(registries):
  _run("extend.md", "Add a scheme", RESIDUALS=residuals.RESIDUALS)
  _run("extend.md", "Add a mixer", CORES=sublayer.CORES)
  config = config_lib.load_config(
    "configs/lm.py:size=micro",
    tiny_run.FIELDS
    | {
      "model.residual.name": "damped",
      "model.num_layers": 2,
      "model.mixers": ("attention", "shift"),
      "data.source": "stdlib",
      "mesh.data": 1,
    },
  )
  mesh = sharding.make_mesh(config.mesh)
  program = train_state.make_program(config, mesh)
  state = program.init_state()
  before = jax.device_get(state.model)
  tokens = np.random.default_rng(0).integers(0, 257, (4, 17), dtype=np.int32)
  batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens)}
  losses = []
  for _ in range(3):
    state, metrics = program.train_step(
      state, sharding.shard_batch(batch, mesh)
    )
    losses.append(float(metrics["loss"]))
  assert losses[-1] < losses[0]
  after = jax.device_get(state.model)
  for part in (lambda m: m.residual, lambda m: m.sublayers["shift"]):
    for a, b in zip(
      jax.tree.leaves(part(after)), jax.tree.leaves(part(before))
    ):
      assert np.any(a != b)
  count = flops.flops_per_token(config.model, 16)
  width = config.model.width
  # Attention with as many heads as keys, then three matrices, both width^2.
  assert count.projections == 2 * (4 + 3) * width**2
  assert figures.name_of("damped") == "Damped"


@pytest.mark.parametrize("name", ["block_attnres", "full_attnres"])
def test_one_function_changes_the_weighting(monkeypatch, name):
  network = tiny_network.model(name, form="one_softmax")
  tokens_BT = np.arange(6, dtype=np.int32)[None]
  before_BTD = network.hidden(tokens_BT)
  scheme = network.residual
  # At zero queries, every weighting that sums to one is a mean.
  scheme.queries.query[...] += 0.5
  softmax_BTD = network.hidden(tokens_BT)
  monkeypatch.setattr(definition, "weigh", definition.weigh)
  _run("architecture.md", "Change the weighting")
  values = network.trace(tokens_BT).values
  weights = scheme.depth_weights(values)
  for l, weights_MBT in enumerate(weights):
    np.testing.assert_allclose(jnp.sum(weights_MBT, axis=0), 1, rtol=1e-5)
    mixture_BTD = sum(
      weight_BT[..., None] * source_BTD
      for weight_BT, source_BTD in zip(weights_MBT, _sources(scheme, values, l))
    )
    np.testing.assert_allclose(
      network.trace(tokens_BT).reads[l], mixture_BTD, atol=1e-5
    )
  assert np.any(np.abs(network.hidden(tokens_BT) - softmax_BTD) > 1e-4)
  scheme.queries.query[...] *= 0
  np.testing.assert_allclose(network.hidden(tokens_BT), before_BTD, atol=1e-5)


def _sources(scheme, values, l):
  """What read l + 1 attends to, from sublayer outputs."""
  size = scheme.block_size
  sources = [values[0]]
  for start in range(0, l, size):
    sources.append(sum(values[start + 1 : min(start + size, l) + 1]))
  return sources
