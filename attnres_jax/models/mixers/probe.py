# SPDX-License-Identifier: Apache-2.0
"""Reads the largest logit of each head out of a backward pass.

A forward pass returns no statistics, and fused attention has no logits to
return. So a mixer may be given a probe: a parameter without any effect, whose
gradient is the largest logit of each head. Gradients are summed over
microbatches; gradients of probes are combined by their maximum instead (`add`).
"""

from collections.abc import Callable
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax.models.mixers import causal_attention


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
  return query_BTNH


def _forward(
  query_BTNH: jax.Array, key_BTKH: jax.Array, segment_ids_BT: jax.Array | None,
  probe_N: jax.Array,
) -> tuple[jax.Array, Any]:  # fmt: skip
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
  _, length, heads, width = query_BTNH.shape
  key_BKTH = jnp.swapaxes(key_BTKH, 1, 2)
  sees = functools.partial(causal_attention.earlier, length, segment_ids_BT)
  keys = causal_attention.Keys(key_BKTH, key_BKTH, sees)

  def of_tile(tile: causal_attention.Tile) -> jax.Array:
    logits_BKGTS = causal_attention.masked_logits(tile, keys, width**-0.5)
    largest_BTKG = jnp.moveaxis(jnp.max(logits_BKGTS, axis=-1), 3, 1)
    return largest_BTKG.reshape(*largest_BTKG.shape[:2], heads)

  tiles = causal_attention.Tile(
    query_BTNH, jnp.arange(length)[None], segment_ids_BT
  )
  largest_BTN = causal_attention.by_tiles(of_tile, tiles, causal_attention.TILE)
  return jnp.max(largest_BTN, axis=(0, 1)).astype(jnp.float32)


def add(total: Any, new: Any) -> Any:
  """Sums of two gradients, but the maximum for probes."""
  return _merge(jnp.add, jnp.maximum, total, new)


def total(gradient: Any, axis: str) -> Any:
  """Within `shard_map`, `add` over the devices along an axis of the mesh."""
  over = lambda function: functools.partial(function, axis_name=axis)
  return _merge(over(jax.lax.psum), over(jax.lax.pmax), gradient)


def _merge(
  of_sums: Callable[..., Any], of_probes: Callable[..., Any], *trees: Any
) -> Any:
  def merge(node, *others):
    function = of_probes if is_probe(node) else of_sums
    return jax.tree.map(function, node, *others)

  is_probe = lambda node: isinstance(node, LogitProbe)
  return jax.tree.map(merge, *trees, is_leaf=is_probe)
