# SPDX-License-Identifier: Apache-2.0
"""The recipes of docs/architecture.md, executed as they are printed."""

import re

import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import figures
from attnres_jax import flops
from attnres_jax import sharding
from attnres_jax import train_state
from attnres_jax.models import residuals
from attnres_jax.models import sublayer
from tests import tiny_run

TEXT = (tiny_run.ROOT / "docs" / "architecture.md").read_text()


def _run(heading, **names):
  """Executes the Python blocks of a section, one after the other."""
  section = TEXT.partition(f"### {heading}\n")[2]
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
  _run("Add a scheme", RESIDUALS=residuals.RESIDUALS)
  _run("Add a mixer", CORES=sublayer.CORES)
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
