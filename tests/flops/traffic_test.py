# SPDX-License-Identifier: Apache-2.0
"""Bytes against sums by hand, and real caches."""

import jax
import pytest

from attnres_jax import models
from attnres_jax.flops import traffic
from tests import tiers
from tests import tiny_network


def _traffic(scheme, num_layers, **fields):
  return traffic.of_scheme(
    tiny_network.config(
      scheme, num_layers=num_layers, dtype="bfloat16", **fields
    )
  )


@pytest.mark.parametrize("scheme", ["prenorm", "rescaled"])
def test_plain_sums(scheme):
  # The sum and the last output; the new sum, which is the next input.
  assert _traffic(scheme, 3) == traffic.Traffic(reads=2, writes=1)


@pytest.mark.parametrize("layers,size", [(2, 4), (6, 4), (5, 4), (4, 16)])
def test_full_sublayer_by_sublayer(layers, size):
  reads = writes = 0
  for start in range(0, 2 * layers, size):
    # Phase 1: the embedding and all earlier values, once for the segment, and
    # a mixture for each sublayer but the first, which goes straight on.
    stop = min(start + size, 2 * layers)
    reads += 1 + start
    writes += stop - start - 1
    for i in range(stop - start):
      reads += i + (i > 0)  # the values of the segment so far, the mixture
      writes += 1  # h
  moved = _traffic("full_attnres", layers, schedule_size=size)
  assert moved.reads == pytest.approx(reads / (2 * layers))
  assert moved.writes == pytest.approx(writes / (2 * layers))


@pytest.mark.parametrize("layers,size", [(2, 4), (6, 4), (5, 4), (27, 6)])
def test_block_sublayer_by_sublayer(layers, size):
  reads = writes = 0
  for start in range(0, 2 * layers, size):
    stop = min(start + size, 2 * layers)
    # Phase 1 reads the embedding and the completed blocks, once.
    reads += 1 + start // size
    writes += stop - start
    for i in range(stop - start):
      # The mixture; the last output; the sum, which the first output starts.
      reads += 1 + (i > 0) + (i > 1)
      writes += 1 + (i > 0)  # h, the sum
    reads += 2 if stop - start > 1 else 1
    writes += 1  # the block
  moved = _traffic("block_attnres", layers, block_size=size)
  assert moved.reads == pytest.approx(reads / (2 * layers))
  assert moved.writes == pytest.approx(writes / (2 * layers))


FIELDS = tiny_network.KINDS | dict(
  width=24,
  num_layers=4,
  num_heads=4,
  num_kv_heads=2,
  mixers=("attention", "kda", "kda", "mla"),
)


@tiers.parametrize("dtype", ["float32", "bfloat16"], first=["bfloat16"])
@pytest.mark.parametrize(
  "fields",
  [{}, dict(name="mudd"), dict(name="mrla_light"), dict(value_residual=True)],
  ids=lambda fields: "-".join(map(str, fields.values())) or "plain",
)
def test_caches_are_those_of_a_decoder(dtype, fields):
  model = tiny_network.config(dtype=dtype, **FIELDS | fields)
  network = jax.eval_shape(lambda: models.build_model(model))
  cache = jax.eval_shape(lambda model: model.init_cache(3, 5), network)
  caches = traffic.of_caches(model)
  assert caches.keys() == cache.states.keys()
  for kind, state in cache.states.items():
    held = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state))
    assert held == 3 * (
      caches[kind].sequence_bytes + 5 * caches[kind].token_bytes
    )
