# SPDX-License-Identifier: Apache-2.0
"""Phase 2 directly from the mathematics, with gradients by autodiff."""

from typing import Any

import jax
import jax.numpy as jnp

from attnres_kernels import platforms


def forward(
  out_TD: jax.Array, lse_T: jax.Array, query_D: jax.Array, partial: Any,
  gain_D: jax.Array | None, *, eps: float, norm_eps: float, heads: int = 1,
  rank: int | None = None,
) -> jax.Array:  # fmt: skip
  """Merges, and applies the next sublayer's pre-norm if there is a gain.

  Several partial sums join one after the other.
  """
  partials = jax.tree.leaves(partial)
  dtype = platforms.accumulator(out_TD, lse_T, query_D, *partials)
  mixed_TD = out_TD.astype(dtype)
  for total_TD in (x.astype(dtype) for x in partials):
    key_TD = _rms_norm(total_TD if rank is None else total_TD[..., -rank:], eps)
    product_TD = key_TD * _row(query_D, dtype, key_TD)
    if heads == 1:
      mixed_TD, lse_T = _mix(mixed_TD, lse_T, product_TD, total_TD)
    else:
      slices = (
        jnp.split(x, heads, axis=-1) for x in (mixed_TD, product_TD, total_TD)
      )
      mixed, lses = zip(
        *(
          _mix(out, lse_T[..., h], product, total)
          for h, (out, product, total) in enumerate(zip(*slices))
        )
      )
      mixed_TD = jnp.concatenate(mixed, axis=-1)
      lse_T = jnp.stack(lses, axis=-1)
  if gain_D is not None:
    mixed_TD = _rms_norm(mixed_TD, norm_eps) * _row(gain_D, dtype, mixed_TD)
  return mixed_TD.astype(out_TD.dtype)


def _mix(
  out_TD: jax.Array, lse_T: jax.Array, product_TD: jax.Array,
  total_TD: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
  """The mixture of both, and its log-normaliser."""
  score_T = jnp.sum(product_TD, axis=-1)
  # Both at once: a softmax over two log-weights, the mixture's and the score.
  out_weight_T = jax.nn.sigmoid(lse_T - score_T)[..., None]
  partial_weight_T = jax.nn.sigmoid(score_T - lse_T)[..., None]
  mixed_TD = out_weight_T * out_TD + partial_weight_T * total_TD
  return mixed_TD, jnp.logaddexp(lse_T, score_T)


def _rms_norm(x_TD: jax.Array, eps: float) -> jax.Array:
  mean_square = jnp.mean(jnp.square(x_TD), axis=-1, keepdims=True)
  return x_TD * jax.lax.rsqrt(mean_square + eps)


def _row(x_D: jax.Array, dtype: Any, like_TD: jax.Array) -> jax.Array:
  return x_D.astype(dtype).reshape((1,) * (like_TD.ndim - 1) + (-1,))
