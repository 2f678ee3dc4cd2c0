# SPDX-License-Identifier: Apache-2.0
"""Small networks whose residual schemes are far from their start."""

import functools

import jax
import numpy as np

from tests import tiny_network


@functools.cache
def network(
  name: str,
  *,
  num_layers: int = 3,
  block_size: int = 4,
  form: str = "two_phase",
  norm_eps: float = 1e-6,
  **fields,
):
  """A network of `num_layers` transformer blocks and random coefficients."""
  model = tiny_network.model(
    name, seed=3, num_layers=num_layers, block_size=block_size, form=form,
    init_std=0.3,
    norm_eps=norm_eps, **fields,
  )  # fmt: skip
  rng = np.random.default_rng(5)
  if hasattr(model.residual, "queries"):
    query = model.residual.queries.query
    query[...] = np.float32(0.5 * rng.standard_normal(query.shape))
    gain = model.residual.queries.gain
    gain[...] = np.float32(1 + 0.2 * rng.standard_normal(gain.shape))
  else:
    model.residual = tiny_network.moved(model.residual, 0.2)
  return model


@jax.jit
def trace(model, tokens_BT):
  return model.trace(tokens_BT)


def tokens(rows: int, length: int) -> np.ndarray:
  rng = np.random.default_rng(0)
  return rng.integers(0, 16, (rows, length), dtype=np.int32)
