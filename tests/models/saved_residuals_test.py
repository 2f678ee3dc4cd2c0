# SPDX-License-Identifier: Apache-2.0
"""The bytes that the forward pass keeps for the backward pass.

The contract (arXiv:2603.15031 section 4.1): one vector per sublayer, and each
block representation once. In a scan, PreNorm's is its float32 stream. Otherwise
PreNorm, as the schemes that read over depth, keeps outputs in the model's
dtype, of which sums are computed again.
"""

import jax
import jax.numpy as jnp
import pytest

from attnres_jax.models import trunk
from tests import jaxprs
from tests import tiers
from tests import tiny_network

TOKENS, WIDTH, HIDDEN, LAYERS = 64, 32, 48, 4


def _saved(remat, dtype="float32", scan=True, **residual):
  fields = dict(width=WIDTH, num_layers=LAYERS, mlp_width=HIDDEN, dtype=dtype)
  model = jax.eval_shape(lambda: tiny_network.model(**fields, **residual))
  embedding = jax.ShapeDtypeStruct((1, TOKENS, WIDTH), dtype)

  def network(layers, residual, embedding):
    kinds = model.config.sublayer_kinds
    return trunk.Trunk(kinds, residual, scan, remat).run(layers, embedding)

  saved = jaxprs.saved(network, model.sublayers, model.residual, embedding)
  return saved, len(model.residual.segments())


SCHEMES = [
  dict(name="prenorm"),
  dict(name="prenorm", scan_layers=False, scan=False, dtype="bfloat16"),
  dict(name="rescaled"),
  dict(name="full_attnres", schedule_size=3),
  dict(name="full_attnres", form="one_softmax"),
  dict(name="block_attnres", block_size=2),
  dict(name="block_attnres", block_size=3),
  dict(name="block_attnres", block_size=4),
  dict(name="block_attnres", block_size=4, scan=False),
  dict(name="block_attnres", block_size=4, dtype="bfloat16"),
  dict(name="block_attnres", block_size=4, form="one_softmax"),
]


def _limit(name, num_blocks, dtype="float32", scan_layers=True, **_):
  """Bytes of L states, N blocks, the embedding, and of the statistics."""
  model, wide = jnp.dtype(dtype).itemsize, 4
  outputs = "full_attnres", "block_attnres", *["prenorm"] * (not scan_layers)
  state = model if name in outputs else wide
  blocks = num_blocks if name == "block_attnres" else 0
  vectors = 2 * LAYERS * state + (blocks + 1) * model
  statistics = 4 * (2 * LAYERS * TOKENS + 6 * WIDTH)
  return TOKENS * WIDTH * vectors, statistics


@tiers.parametrize("fields", SCHEMES, first=3)
def test_full_keeps_one_vector_per_sublayer_and_block(fields):
  saved, num_blocks = _saved("full", **fields)
  vectors, statistics = _limit(num_blocks=num_blocks, **fields)
  large = [a for a in saved if a.size >= TOKENS * WIDTH]
  small = [a for a in saved if a.size < TOKENS * WIDTH]
  assert all(a.shape[-1] == WIDTH for a in large), large
  assert sum(map(jaxprs.nbytes, large)) <= vectors, large
  assert sum(map(jaxprs.nbytes, small)) <= statistics, small
  # No mixtures of phase 1 and no stack of sources among them.
  count = sum(a.size for a in large) / (TOKENS * WIDTH)
  assert count <= 2 * LAYERS + num_blocks
  # Not less either, because backward starts from the states.
  states = 2 * LAYERS - 1
  itemsize = min(a.dtype.itemsize for a in large)
  assert sum(map(jaxprs.nbytes, large)) >= states * TOKENS * WIDTH * itemsize


@pytest.mark.parametrize("scan", [False, True])
def test_reads_of_depth_keep_no_float32_vectors(scan):
  """In bfloat16, not even of partial sums, which are sums of float32.

  Only a scan needs a partial sum in front of the first sublayer of a block.
  """
  fields = dict(name="block_attnres", block_size=4, dtype="bfloat16")
  saved, num_blocks = _saved("none", scan=scan, scan_layers=scan, **fields)
  vectors = [a for a in saved if a.shape[-2:] == (TOKENS, WIDTH)]
  assert all(a.dtype == jnp.bfloat16 for a in vectors), vectors
  # Of every read its mixture, its partial sum and its result; and the blocks.
  count = 3 * 2 * LAYERS + num_blocks
  if not scan:
    # In front of the first read of a block, there is no partial sum.
    count -= num_blocks
  assert sum(a.size for a in vectors) == count * TOKENS * WIDTH


@pytest.mark.more
def test_dots_also_keeps_products():
  fields = dict(name="block_attnres", block_size=4)
  saved = {
    remat: _saved(remat, **fields)[0] for remat in ("full", "dots", "none")
  }
  size = {k: sum(map(jaxprs.nbytes, v)) for k, v in saved.items()}
  assert size["full"] < size["dots"] < size["none"]
  assert any(a.shape[-1] == HIDDEN for a in saved["dots"])
  # Scores of T x T are no plain products and are recomputed.
  assert not any(a.shape[-2:] == (TOKENS, TOKENS) for a in saved["dots"])
