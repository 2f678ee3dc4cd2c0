# SPDX-License-Identifier: Apache-2.0
"""Bounds of a step against counts by hand, and how they depend on a config."""

import jax
import pytest

from attnres_jax import config as config_lib
from attnres_jax import flops
from attnres_jax.common import sharding
from attnres_jax.flops import parameters
from attnres_jax.plan import least
from attnres_jax.train import train_state
from tests.plan import small

TOKENS = 4 * 256


def _program(config="configs/lm.py:size=tiny", **fields):
  fields = (
    small.FIELDS
    | {
      "model.dtype": "bfloat16",
      "data.batch_size": 4,
      "data.sequence_length": 256,
      "mesh.data": 1,
    }
    | fields
  )
  config = config_lib.load_config(config, fields)
  size = config.mesh.data * config.mesh.fsdp * config.mesh.tensor
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:size])
  return train_state.make_program(config, mesh)


def test_sublayers_by_hand():
  program = _program()
  model = program.config.model
  count = 3 * model.width * model.mlp_size
  vectors = 5 * TOKENS * model.width * 2
  gain = 3 * 4 * model.width
  weights = 2 * 2 * count + (4 + 2) * count + 4 * count
  needs = least.of_parts(program)["mlp"]
  assert needs.moved_bytes == 2 * (vectors + weights + gain)
  assert needs.flops == 3 * 2 * count * 2 * TOKENS


def test_flops_are_those_of_the_model():
  model = _program().config.model
  needs = least.of_parts(_program())
  per_token = flops.flops_per_token(model, 256)
  total = sum(part.flops or 0.0 for part in needs.values())
  assert total == pytest.approx(per_token.train * TOKENS)
  # Checkpointing repeats the forward pass, except for the head.
  again = least.of_parts(_program(**{"model.remat": "full"}))
  more = sum(part.flops or 0.0 for part in again.values()) - total
  assert more == pytest.approx((per_token.forward - per_token.head) * TOKENS)
  assert again["mlp"].moved_bytes > needs["mlp"].moved_bytes
  # Muon multiplies matrices, AdamW does not.
  assert needs["optimiser"].flops == 0
  muon = least.of_parts(_program(**{"optim.name": "muon"}))
  assert muon["optimiser"].flops > 0


def test_microbatches_read_weights_again_and_add_gradients():
  single, four = (
    least.of_parts(_program(**{"optim.accumulate_steps": n})) for n in (1, 4)
  )
  total = parameters.of_parts(_program().config.model)
  added = sum(n.total for part, n in total.items() if part != "embedding")
  assert single["accumulation"].moved_bytes == 0
  assert four["accumulation"].moved_bytes == 3 * 4 * added
  assert four["mlp"].moved_bytes > single["mlp"].moved_bytes
  assert four["optimiser"] == single["optimiser"]


def test_the_optimiser_reads_and_writes_what_it_keeps():
  program = _program()
  state = program.abstract_state
  parameter, moments = map(
    sharding.bytes_per_device, (state.model, state.opt_state)
  )
  expected = 2 * (2 * parameter + moments)
  assert least.of_parts(program)["optimiser"].moved_bytes == expected


def test_shards_are_gathered_and_cuts_are_not():
  """Two devices: each reads whole weights, or one half of them."""
  alike = least.of_parts(_program())
  gathered = least.of_parts(_program(**{"mesh.fsdp": 2}))
  cut = least.of_parts(_program(**{"mesh.tensor": 2}))
  assert cut["mlp"].flops == gathered["mlp"].flops == alike["mlp"].flops / 2
  assert cut["mlp"].moved_bytes < gathered["mlp"].moved_bytes
  assert (
    cut["head and loss"].moved_bytes < gathered["head and loss"].moved_bytes
  )
  assert gathered["mlp"].moved_bytes > alike["mlp"].moved_bytes / 2
