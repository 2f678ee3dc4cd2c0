# SPDX-License-Identifier: Apache-2.0
"""Depth attention directly from the paper (Eq. 2-4): simple and slow.

Everything in float32, or float64 when any input is; gradients by autodiff.
"""

import jax
import jax.numpy as jnp

from attnres_kernels import dispatch


def attend(
  query_QD,
  sources,
  num_sources,
  gain_D=None,
  *,
  eps,
  heads=1,
  rank=None,
  norm_eps=0.0,
):
  """One softmax per query, head and token over all sources.

  With a gain, the first mixture is normalised.
  """
  stacked = sources if isinstance(sources, jax.Array) else jnp.stack(sources)
  dtype = dispatch.accumulator(query_QD, stacked)
  source_MTD = stacked.astype(dtype)
  num_slots = source_MTD.shape[0]
  count = num_slots if num_sources is None else num_sources
  valid_M = jnp.arange(num_slots) < count
  # The contents of an unused slot must not leak in, not even a NaN.
  valid_M1 = valid_M.reshape((num_slots,) + (1,) * (source_MTD.ndim - 1))
  source_MTD = jnp.where(valid_M1, source_MTD, 0)

  key_MTD = source_MTD if rank is None else source_MTD[..., -rank:]
  mean_square = jnp.mean(jnp.square(key_MTD), axis=-1, keepdims=True)
  key_MTD = key_MTD * jax.lax.rsqrt(mean_square + eps)

  def attend_one_head(query_QD, key_MTD, source_MTD):
    return _attend(query_QD.astype(dtype), key_MTD, source_MTD, valid_M1)

  slices = (
    jnp.split(x, heads, axis=-1) for x in (query_QD, key_MTD, source_MTD)
  )
  outs, lses = zip(*map(attend_one_head, *slices))
  out_QTD = jnp.concatenate(outs, axis=-1)
  lse_QT = lses[0] if heads == 1 else jnp.stack(lses, axis=-1)
  if gain_D is not None:
    first_TD = out_QTD[0]
    mean_square = jnp.mean(jnp.square(first_TD), axis=-1, keepdims=True)
    first_TD = first_TD * jax.lax.rsqrt(mean_square + norm_eps)
    gain = gain_D.astype(dtype).reshape((1,) * (first_TD.ndim - 1) + (-1,))
    out_QTD = out_QTD.at[0].set(first_TD * gain)
  return out_QTD.astype(stacked.dtype), lse_QT


def _attend(query_QD, key_MTD, source_MTD, valid_M1):
  score_QMT = jnp.einsum(
    "qd,m...d->qm...",
    query_QD,
    key_MTD,
    precision=jax.lax.Precision.HIGHEST,
  )
  score_QMT = jnp.where(valid_M1[None, ..., 0], score_QMT, -jnp.inf)
  # With no valid source at all every score is -inf: shift by 0, not by -inf.
  top_QT = jnp.max(score_QMT, axis=1, keepdims=True)
  top_QT = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top_QT), top_QT, 0))
  unnormalised_QMT = jnp.exp(score_QMT - top_QT)
  total_QT = jnp.sum(unnormalised_QMT, axis=1)
  empty_QT = total_QT == 0
  safe_QT = jnp.where(empty_QT, 1, total_QT)
  weight_QMT = unnormalised_QMT / jnp.expand_dims(safe_QT, 1)
  out_QTD = jnp.einsum(
    "qm...,m...d->q...d",
    weight_QMT,
    source_MTD,
    precision=jax.lax.Precision.HIGHEST,
  )
  lse_QT = jnp.where(empty_QT, -jnp.inf, jnp.log(safe_QT) + top_QT[:, 0])
  return out_QTD, lse_QT


def backward(
  query_QD,
  sources,
  count,
  lse_QT,
  dout_QTD,
  dlse_QT,
  accumulate=None,
  *,
  eps,
  **options,
):
  """Gradients of the queries and of every source, by autodiff."""
  del lse_QT  # Autodiff runs the forward pass itself.
  (out_QTD, lse_QT), vjp = jax.vjp(
    lambda query, sources: attend(query, sources, count, eps=eps, **options),
    query_QD,
    sources,
  )
  dquery_QD, dsources = vjp(
    (dout_QTD.astype(out_QTD.dtype), dlse_QT.astype(lse_QT.dtype))
  )
  if accumulate is not None:
    dsources = jax.tree.map(
      lambda old, new: old + new.astype(old.dtype), accumulate, dsources
    )
  return dquery_QD, dsources
