# SPDX-License-Identifier: Apache-2.0
"""FLOPs against counts by hand."""

import pytest

from attnres_jax import config as config_lib
from attnres_jax import flops
from tests import tiny_network


def _model(name="prenorm", **fields):
  # No two sizes are equal, so that none stands for another.
  sizes = dict(vocab_size=11, width=8, num_kv_heads=1, mlp_width=12)
  return tiny_network.config(name, **sizes | fields)


def test_parts_by_hand():
  count = flops.flops_per_token(_model(), sequence_length=6)
  # Two layers; queries and output 8x8, keys and values 8x4, two FLOPs each.
  assert count.projections == 2 * 2 * (64 + 64 + 32 + 32)
  # Scores and values: 8 wide, 2 FLOPs, on average half of 6 positions.
  assert count.attention == 2 * 2 * (2 * 8 * 3)
  assert count.mlp == 2 * 3 * 2 * 8 * 12
  assert count.head == 2 * 8 * 11
  assert count.residual == 0
  assert count.forward == 768 + 192 + 1152 + 176
  assert count.train == 3 * count.forward


def full_reads(num_sublayers):
  """Pairs of (read, source), and sources: read l of 2..L+1 sees l (Eq. 1-4)."""
  return sum(range(2, num_sublayers + 2)), num_sublayers + 1


def block_reads(num_sublayers, block_size):
  """Completed blocks, and the partial sum past a block's first read (Eq. 5-6).

  A read of one source alone is a copy.
  """
  num_blocks = -(-num_sublayers // block_size)
  per_read = [
    1 + sublayer // block_size + (1 if sublayer % block_size else 0)
    for sublayer in range(num_sublayers)
  ]
  per_read.append(num_blocks + 1)
  pairs = sum(count for count in per_read if count > 1)
  return pairs, num_blocks + 1 + num_sublayers - num_blocks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["two_phase", "one_softmax"])
@pytest.mark.parametrize("layers,size", [(1, 1), (2, 2), (4, 3), (5, 4)])
def test_residual_is_the_closed_form(layers, size, form, dtype):
  reads = {
    "prenorm": (0, 0),
    "rescaled": (0, 0),
    "full_attnres": full_reads(2 * layers),
    "block_attnres": block_reads(2 * layers, size),
  }
  for scheme, (pairs, sources) in reads.items():
    model = _model(
      scheme, num_layers=layers, dtype=dtype, block_size=size, form=form,
      schedule_size=3,
    )  # fmt: skip
    count = flops.flops_per_token(model, 6)
    assert count.residual == 8 * (4 * pairs + 2 * sources)


def _kimi(**kda):
  return _model(
    mixers=("kda", "mla"),
    last_mixer="kda",
    num_heads=3,
    num_kv_heads=0,
    num_layers=3,
    kda=config_lib.KdaConfig(head_width=4, gate_rank=5, **kda),
    mla=config_lib.MlaConfig(
      latent_rank=6, nope_width=4, shared_width=2, value_width=5
    ),
    moe=config_lib.MoeConfig(
      num_experts=16, top_k=2, expert_width=10, num_shared=2, dense_layers=1
    ),
  )


def test_kimi_parts_by_hand():
  """KDA with a dense MLP, MLA with experts, KDA with experts."""
  count = flops.flops_per_token(_kimi(chunk_size=2), sequence_length=6)
  inner = 3 * 4
  kda = 4 * 8 * inner + 2 * 5 * (8 + inner) + 8 * 3 + 3 * 4 * inner
  mla = 8 * 3 * 6 + 8 * 8 + 6 * 3 * 9 + 3 * 5 * 8
  assert count.projections == 2 * (2 * kda + mla)
  # Router, and two routed and two shared experts.
  assert count.mlp == 2 * (3 * 8 * 12 + 2 * (8 * 16 + 4 * 3 * 8 * 10))
  # Keys of 6 and values of 5, half of 6 positions, three heads.
  assert count.attention == 2 * 3 * (6 + 5) * 3


@pytest.mark.parametrize("chunk", [1, 2, 8])
def test_kda_flops_product_by_product(chunk):
  """Every product of one chunk, its size counted; triangles are half."""
  head = 4

  def product(rows, inner, columns, part=1.0):
    return part * 2 * rows * inner * columns

  of_chunk = [
    product(chunk, head, chunk, 0.5),  # K K^T
    product(chunk, head, chunk, 0.5),  # Q K^T
    chunk**3 / 3,  # inverse of a triangle
    product(chunk, chunk, head, 0.5),  # W
    product(chunk, chunk, head, 0.5),  # U
    product(chunk, head, head),  # W S
    product(chunk, head, head),  # Q S
    product(chunk, chunk, head, 0.5),  # (Q K^T) V~
    product(head, chunk, head),  # K^T V~
  ]
  count = flops.flops_per_token(_kimi(chunk_size=chunk), sequence_length=6)
  # Two KDA mixers of three heads.
  expected = 2 * 3 * sum(of_chunk) / chunk
  assert count.recurrence == pytest.approx(expected, rel=1e-12)
