# SPDX-License-Identifier: Apache-2.0
"""Bytes against the paper's table, against sums by hand, and real caches."""

import dataclasses

from flax import nnx
import jax
import pytest

from attnres_jax import config as config_lib
from attnres_jax.flops import traffic
from attnres_jax.models import mixers
from attnres_jax.models import residuals

TYPICAL = (8, 16)  # N, S of the paper's last column, L = 128.


def test_table_1():
  totals = {name: f(*TYPICAL).total for name, f in traffic.PRINTED.items()}
  assert totals == {
    "prenorm": 3,
    "rescaled": 3,
    "full_attnres": 24,
    "block_attnres": 5.5,
  }
  assert traffic.PRINTED["full_attnres"](*TYPICAL) == traffic.Traffic(22, 2)
  assert traffic.PRINTED["block_attnres"](*TYPICAL) == traffic.Traffic(3.5, 2)


@pytest.mark.parametrize("blocks,size", [(1, 4), (3, 4), (8, 16)])
def test_full_counted_sublayer_by_sublayer(blocks, size):
  reads = writes = 0
  for block in range(blocks):
    # Phase 1: the embedding and all earlier values, once for the block, and a
    # mixture for each sublayer but the first, which goes straight on.
    reads += 1 + block * size
    writes += size - 1
    for i in range(size):
      reads += i + (i > 0)  # the values of the block so far, the mixture
      writes += 1  # h
  counted = traffic.COUNTED["full_attnres"](blocks, size)
  assert counted.reads == pytest.approx(reads / (blocks * size))
  assert counted.writes == pytest.approx(writes / (blocks * size))


@pytest.mark.parametrize("blocks,size", [(1, 4), (3, 4), (9, 6)])
def test_block_counted_block_by_block(blocks, size):
  # Phase 1 of block n reads the embedding and n - 1 blocks, once.
  phase_1 = sum(range(1, blocks + 1)) / (blocks * size)
  counted = traffic.COUNTED["block_attnres"](blocks, size)
  assert counted.reads == pytest.approx(phase_1 + 3)
  assert counted.writes == 3


def test_every_scheme_has_a_row():
  for table in (traffic.PRINTED, traffic.COUNTED):
    assert set(table) == set(residuals.RESIDUALS)


@pytest.mark.parametrize(
  "scheme,fields,expected",
  [
    ("block_attnres", dict(block_size=6), 9 / 6 + 5),
    ("block_attnres", dict(num_blocks=9), 9 / 6 + 5),
    ("block_attnres", dict(block_size=8), 7 / 8 + 5),  # a short last block
    ("full_attnres", dict(schedule_size=6), 9 + 6),
    ("full_attnres", dict(schedule_size=100), 1 + 54),  # one block
    ("prenorm", {}, 3),
  ],
)
def test_of_scheme(scheme, fields, expected):
  residual = config_lib.ResidualConfig(name=scheme, **fields)
  model = config_lib.ModelConfig(num_layers=27, residual=residual)
  assert traffic.of_scheme(model, traffic.PRINTED).total == expected


MODEL = config_lib.ModelConfig(
  vocab_size=7,
  width=24,
  num_layers=4,
  num_heads=4,
  num_kv_heads=2,
  mixers=("attention", "kda", "kda", "mla"),
  kda=config_lib.KdaConfig(head_width=4, gate_rank=5),
  mla=config_lib.MlaConfig(
    latent_rank=6, nope_width=4, shared_width=2, value_width=5
  ),
)


@pytest.mark.parametrize("dtype,size", [("float32", 4), ("bfloat16", 2)])
class TestCaches:
  def test_attention_by_hand(self, dtype, size):
    model = dataclasses.replace(MODEL, dtype=dtype)
    caches = traffic.of_caches(model)
    assert list(caches) == ["attention", "kda", "mla"]
    # Keys and values of two heads, six wide.
    assert caches["attention"] == traffic.Cache(token_bytes=2 * 2 * 6 * size)

  def test_kda_is_the_mixers_state(self, dtype, size):
    model = dataclasses.replace(MODEL, dtype=dtype)
    state = jax.eval_shape(
      lambda: mixers.Kda(model, rngs=nnx.Rngs(0)).init_state(3)
    )
    held = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state))
    found = traffic.of_caches(model)["kda"]
    # Three sequences, two such mixers.
    assert found == traffic.Cache(sequence_bytes=2 * held // 3)

  def test_mla_is_the_mixers_cache(self, dtype, size):
    model = dataclasses.replace(MODEL, dtype=dtype)
    cache = jax.eval_shape(
      lambda: mixers.Mla(model, rngs=nnx.Rngs(0)).init_cache(1, 10)
    )
    held = cache.tokens_BSC.size * cache.tokens_BSC.dtype.itemsize
    found = traffic.of_caches(model)["mla"]
    assert found == traffic.Cache(token_bytes=held // 10)


def test_48b():
  model = config_lib.ModelConfig(
    width=2304,
    num_layers=27,
    num_heads=32,
    mixers=("kda", "kda", "kda", "mla"),
    last_mixer="mla",
    dtype="bfloat16",
  )
  caches = traffic.of_caches(model)
  assert caches["mla"].token_bytes == 7 * 576 * 2
  tails = 3 * 3 * 32 * 128 * 2
  assert caches["kda"].sequence_bytes == 20 * (32 * 128**2 * 4 + tails)
