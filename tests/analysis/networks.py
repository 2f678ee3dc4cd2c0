# SPDX-License-Identifier: Apache-2.0
"""Small networks whose residual schemes are far from their start."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import analysis
from attnres_jax import models
from attnres_jax.models.residuals import base
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
    model.residual = jax.tree.map(
      lambda a: a + np.float32(0.2) * rng.standard_normal(a.shape, "float32"),
      model.residual,
    )
  return model


class Recorded(models.Transformer):
  """A scheme alone, whose sublayers return given values [L + 1, B, T, D]."""

  def __init__(self, residual, values):
    self.residual = residual
    self.values = jnp.asarray(values)

  def trace(self, tokens_BT):
    del tokens_BT
    return base.Trace(tuple(self.values), ())


def recorded_matrix(residual, values) -> np.ndarray:
  """M with the row of the readout, of one token's recorded values [L + 1, D].

  A mean over channels.
  """
  model = Recorded(residual, values[:, None, None])
  return analysis.mixing_matrix(model, tokens(1, 1), include_output=True)


@jax.jit
def trace(model, tokens_BT):
  return model.trace(tokens_BT)


def tokens(rows: int, length: int) -> np.ndarray:
  rng = np.random.default_rng(0)
  return rng.integers(0, 16, (rows, length), dtype=np.int32)
