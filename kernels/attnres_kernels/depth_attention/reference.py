# SPDX-License-Identifier: Apache-2.0
"""Depth attention directly from the paper (Eq. 2-4): simple and slow.

Everything in float32, or float64 when any input is; gradients by autodiff.
"""

import functools

import jax
import jax.numpy as jnp

from attnres_kernels import platforms


def forward(
  query_QD: jax.Array, sources: tuple[jax.Array, ...], *, eps: float,
  heads: int = 1, rank: int | None = None,
) -> tuple[tuple[jax.Array, ...], jax.Array]:  # fmt: skip
  """One softmax per query, head and token over all sources.

  Returns:
    A tuple of Q mixtures, and the log-normalisers [Q, ...] or [Q, ..., H].
  """
  source_MTD = jnp.stack(sources)
  dtype = platforms.accumulator(query_QD, source_MTD)
  source_MTD = source_MTD.astype(dtype)
  key_MTD = source_MTD if rank is None else source_MTD[..., -rank:]
  mean_square = jnp.mean(jnp.square(key_MTD), axis=-1, keepdims=True)
  key_MTD = key_MTD * jax.lax.rsqrt(mean_square + eps)
  slices = (
    jnp.split(x, heads, axis=-1)
    for x in (query_QD.astype(dtype), key_MTD, source_MTD)
  )
  outs, lses = zip(*map(_attend, *slices))
  out_QTD = jnp.concatenate(outs, axis=-1).astype(sources[0].dtype)
  lse_QT = lses[0] if heads == 1 else jnp.stack(lses, axis=-1)
  return tuple(out_QTD), lse_QT


def _attend(
  query_QD: jax.Array, key_MTD: jax.Array, source_MTD: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Mixtures [Q, ..., D] of one head, and their log-normalisers."""
  exact = jax.lax.Precision.HIGHEST
  product = functools.partial(jnp.einsum, precision=exact)
  score_QMT = product("qd,m...d->qm...", query_QD, key_MTD)
  weight_QMT = jax.nn.softmax(score_QMT, axis=1)
  out_QTD = product("qm...,m...d->q...d", weight_QMT, source_MTD)
  return out_QTD, jax.nn.logsumexp(score_QMT, axis=1)
