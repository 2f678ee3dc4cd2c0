# SPDX-License-Identifier: Apache-2.0
"""Token embedding and the output head, tied or not."""

import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.common import scopes
from attnres_jax.common import sharding
from attnres_jax.models import linear


class Embedding(nnx.Module):
  """Table of token vectors, and the matrix that turns states into logits."""

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    if not config.vocab_size:
      config_lib.fail("model.vocab_size", 0, "the tokenizer's vocabulary size")
    self.dtype = jnp.dtype(config.dtype)
    self.soft_cap = config.logit_soft_cap
    matrix = linear.matrices(config.init_std, rngs)
    self.table = matrix("V|D", config.vocab_size, config.width)
    self.head = (
      None
      if config.tie_embeddings
      else matrix("D|V", config.width, config.vocab_size)
    )

  def encode(self, tokens_BT: jax.Array) -> jax.Array:
    """Token vectors [B, T, D] in the model's dtype, unscaled (b_0 = h_1).

    Several batches may be stacked before B.
    """
    with scopes.part(scopes.EMBEDDING):
      if sharding.scatters():
        return _encode_by_shards(self.dtype, self.table[...], tokens_BT)
      # XLA ends on a lookup of copies' tables that two axes cut.
      table_VD = sharding.within_copies(self.table[...], sharding.FIRST_AXIS)
      return _encode(self.dtype, table_VD, tokens_BT)

  def add_gradient(
    self, total_VD: jax.Array, tokens_BT: jax.Array, d_BTD: jax.Array
  ) -> jax.Array:
    """Adds to a gradient of the table that of the vectors of some tokens."""
    with scopes.part(scopes.EMBEDDING):
      return _add_rows(total_VD, tokens_BT, d_BTD)

  def head_DV(self) -> jax.Array:
    """The head matrix [D, V]: float32, unless inference changed it."""
    return self.table[...].T if self.head is None else self.head[...]

  def decode(self, h_BTD: jax.Array) -> jax.Array:
    """float32 logits [B, T, V] of states after the final norm."""
    return logits(h_BTD, self.head_DV(), self.soft_cap)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _encode(dtype: Any, table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
  return jnp.take(table_VD, tokens_BT, axis=0).astype(dtype)


def _encode_by_shards(
  dtype: Any, table_VD: jax.Array, tokens_BT: jax.Array
) -> jax.Array:
  """Each device looks up the tokens of its part of the vocabulary.

  The compiler might gather the whole table.
  """

  def of_part(table_VD, tokens_BT):
    size = table_VD.shape[0]
    place_BT = tokens_BT - size * jax.lax.axis_index(sharding.TENSOR)
    is_local_BT1 = ((place_BT >= 0) & (place_BT < size))[..., None]
    row_BTD = jnp.take(table_VD, place_BT, axis=0, mode="clip").astype(dtype)
    return jnp.where(is_local_BT1, row_BTD, jnp.zeros((), dtype))

  return sharding.scatter_sum(of_part, sharding.FIRST_AXIS, sharding.SEQUENCES)(
    table_VD, tokens_BT
  )


def _encode_forward(
  dtype: Any, table_VD: jax.Array, tokens_BT: jax.Array
) -> tuple[jax.Array, Any]:
  # Of the table, only the shape and dtype matter.
  shape = jnp.zeros((table_VD.shape[0], 0), table_VD.dtype)
  return _encode(dtype, table_VD, tokens_BT), (shape, tokens_BT)


def _encode_backward(
  dtype: Any, residuals: Any, d_BTD: jax.Array
) -> tuple[jax.Array, None]:
  """Every device adds up its own rows; then they are summed over devices."""
  shape, tokens_BT = residuals

  def of_rows(tokens_BT, d_BTD):
    wide = precision.wide(shape.dtype)
    zeros_VD = jnp.zeros((shape.shape[0], d_BTD.shape[-1]), wide)
    return _add_rows(zeros_VD, tokens_BT, d_BTD)[None]

  rows = sharding.stacked_sequences(tokens_BT.ndim - 2)
  parts = sharding.by_shards(
    of_rows, (rows, rows), sharding.SEQUENCES, sharding.ROWS
  )
  total_VD = jnp.sum(parts(tokens_BT, d_BTD), axis=0)
  return total_VD.astype(shape.dtype), None


_encode.defvjp(_encode_forward, _encode_backward)


def _add_rows(
  total_VD: jax.Array, tokens_BT: jax.Array, d_BTD: jax.Array
) -> jax.Array:
  d_UD = jnp.reshape(d_BTD, (-1, d_BTD.shape[-1])).astype(total_VD.dtype)
  return total_VD.at[jnp.reshape(tokens_BT, -1)].add(d_UD)


def logits(
  h_BTD: jax.Array,
  head_DV: jax.Array,
  soft_cap: float = 0.0,
) -> jax.Array:
  """float32 logits of states after the final norm, `soft_capped`.

  The product runs in the dtype of `h_BTD`.
  """
  with scopes.part(scopes.HEAD):
    logits_BTV = linear.linear(h_BTD, head_DV, 1, precision.wide(h_BTD.dtype))
    return soft_capped(logits_BTV, soft_cap)


def soft_capped(logits: jax.Array, soft_cap: float) -> jax.Array:
  """Returns cap * tanh(logits / cap), or the logits if cap is 0."""
  return soft_cap * jnp.tanh(logits / soft_cap) if soft_cap else logits
