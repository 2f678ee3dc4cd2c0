# SPDX-License-Identifier: Apache-2.0
"""Reads the largest logit of each head out of a backward pass.

A forward pass returns no statistics, and fused attention has no logits to
return. So a mixer may be given a probe: a parameter without any effect, whose
gradient is the largest logit of each head. Gradients are summed over
microbatches; gradients of probes are combined by their maximum instead (`add`).
"""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax.common import precision

# Queries whose logits exist at the same time.
_TILE = 512


class LogitProbe(nnx.Param):
  """Zeros for each head of a mixer."""


@jax.custom_vjp
def probed(
  query_BTNH: jax.Array,
  key_BTKH: jax.Array,
  segment_ids_BT: jax.Array | None,
  probe_N: jax.Array,
) -> jax.Array:
  """The queries; the gradient of `probe_N` is `largest_logits`."""
  del key_BTKH, segment_ids_BT, probe_N
  return query_BTNH


def _forward(
  query_BTNH: jax.Array, key_BTKH: jax.Array, segment_ids_BT: jax.Array | None,
  probe_N: jax.Array,
) -> tuple[jax.Array, Any]:  # fmt: skip
  del probe_N
  return query_BTNH, (query_BTNH, key_BTKH, segment_ids_BT)


def _backward(
  residuals: Any, dquery_BTNH: jax.Array
) -> tuple[jax.Array | None, ...]:
  key_BTKH = residuals[1]
  return (
    dquery_BTNH, jnp.zeros_like(key_BTKH), None, largest_logits(*residuals),
  )  # fmt: skip


probed.defvjp(_forward, _backward)


def largest_logits(
  query_BTNH: jax.Array,
  key_BTKH: jax.Array,
  segment_ids_BT: jax.Array | None = None,
) -> jax.Array:
  """The largest q . k / sqrt(H) of each head, float32 [N].

  Over the pairs that causal attention within documents takes into account.
  """
  batch, length, heads, width = query_BTNH.shape
  group = heads // key_BTKH.shape[2]
  tile = min(_TILE, length)
  missing = -length % tile

  def cut(x_BT):
    """[B, T, ...] as tiles [X, B, C, ...]."""
    padding = ((0, 0), (0, missing), *[(0, 0)] * (x_BT.ndim - 2))
    x_BT = jnp.pad(x_BT, padding)
    x_BXC = x_BT.reshape(batch, -1, tile, *x_BT.shape[2:])
    return jnp.moveaxis(x_BXC, 1, 0)

  def of_tile(tile_inputs):
    query_BCKGH = tile_inputs["query"].reshape(batch, tile, -1, group, width)
    logits_BKGCS = jnp.einsum(
      "BCKGH,BSKH->BKGCS", query_BCKGH, key_BTKH,
      preferred_element_type=precision.wide(query_BTNH.dtype),
    )  # fmt: skip
    position_C = tile_inputs["position"]
    # Padding, behind the last key, sees what the last query may not see.
    sees = position_C[:, None] >= jnp.arange(length)[None]
    sees &= (position_C < length)[:, None]
    sees = sees[None]
    if segment_ids_BT is not None:
      sees &= tile_inputs["segment"][:, :, None] == segment_ids_BT[:, None]
    logits_BKGCS = jnp.where(sees[:, None, None], logits_BKGCS, -jnp.inf)
    return jnp.max(logits_BKGCS, axis=(0, 3, 4)).reshape(heads)

  tiles = {
    "query": cut(query_BTNH),
    "position": jnp.arange(length + missing).reshape(-1, tile),
  }
  if segment_ids_BT is not None:
    tiles["segment"] = cut(segment_ids_BT)
  largest_XN = jax.lax.map(of_tile, tiles)
  return (jnp.max(largest_XN, axis=0) * width**-0.5).astype(jnp.float32)


def add(total: Any, new: Any) -> Any:
  """Sums of two gradients, but the maximum for probes."""

  def merge(a, b):
    combine = jnp.maximum if isinstance(a, LogitProbe) else jnp.add
    return jax.tree.map(combine, a, b)

  is_probe = lambda node: isinstance(node, LogitProbe)
  return jax.tree.map(merge, total, new, is_leaf=is_probe)
