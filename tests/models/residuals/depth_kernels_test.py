# SPDX-License-Identifier: Apache-2.0
"""Depth reads of every kind are kernels in a program that is made for TPUs."""

import jax
import jax.numpy as jnp
import pytest

from attnres_jax import config as config_lib
from tests import tiny_network

slow = pytest.mark.slow
MERGES = {"depth_merge_forward", "depth_merge_backward"}
PHASE_1 = {"depth_attention_forward", "depth_attention_backward"}


def program(name, **read):
  """A gradient of a network, lowered for TPUs."""
  options = config_lib.DepthReadConfig(**read)
  network = tiny_network.config(
    name, num_layers=4, mlp_width=32, scan_layers=False, read=options
  )
  model = jax.eval_shape(lambda: tiny_network.models.build_model(network))
  tokens_BT = jax.ShapeDtypeStruct((1, 8), jnp.int32)

  def loss(model, tokens_BT):
    return jnp.sum(jnp.square(model.hidden(tokens_BT).astype(jnp.float32)))

  step = jax.jit(jax.grad(loss, allow_int=True)).trace(model, tokens_BT)
  return step.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize(
  "name,read,kernels",
  [
    ("block_attnres", dict(heads=2), PHASE_1 | MERGES),
    pytest.param("block_attnres", dict(rank=4), PHASE_1 | MERGES, marks=slow),
    pytest.param(
      "block_attnres",
      dict(heads=2, value_query=True, null="learned"),
      PHASE_1 | MERGES,
      marks=slow,
    ),
    pytest.param("full_attnres", dict(heads=2), PHASE_1 | MERGES, marks=slow),
    # The open block is no source.
    pytest.param("delta_block", dict(heads=2), PHASE_1, marks=slow),
    pytest.param("delta_mh", dict(), PHASE_1, marks=slow),
    pytest.param("delta_attnres", dict(), PHASE_1 | MERGES, marks=slow),
  ],
)
def test_reads_are_kernels(name, read, kernels):
  text = program(name, **read)
  names = {kernel for kernel in PHASE_1 | MERGES if kernel in text}
  assert names == kernels


def test_norm_of_a_blocks_first_mixture_is_a_kernel():
  """No merge computes it, and no matrix product could."""
  assert "rms_norm_forward" in program("block_attnres")
