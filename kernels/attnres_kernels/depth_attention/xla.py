# SPDX-License-Identifier: Apache-2.0
"""Depth attention in plain JAX, forward and backward by hand.

Float32 statistics for any source dtype; token axes are never merged, so that
a sharded batch or sequence axis stays where it is.
"""

import jax
import jax.numpy as jnp


def forward(query_QD, sources, count, *, eps):
  """Returns the mixtures and their log-normalisers."""
  slots = _slots(sources, count, query_QD.dtype)
  score_MQT, _ = _scores(query_QD, slots, count, eps)
  top_QT = jnp.max(score_MQT, axis=0)
  top_QT = jnp.where(jnp.isfinite(top_QT), top_QT, 0)
  total_QT = jnp.sum(jnp.exp(score_MQT - top_QT[None]), axis=0)
  # log 0 = -inf is the right answer for an empty set.
  lse_QT = top_QT + jnp.log(total_QT)
  weight_MQT = _weights(score_MQT, lse_QT)
  out_QTD = sum(
    weight_MQT[i][..., None] * slot[None] for i, slot in enumerate(slots)
  )
  return out_QTD.astype(_dtype(sources)), lse_QT


def backward(query_QD, sources, count, lse_QT, dout_QTD, dlse_QT, *, eps):
  """Returns the gradients of the queries and of every source."""
  dtype = query_QD.dtype
  width = query_QD.shape[-1]
  slots = _slots(sources, count, dtype)
  dout_QTD = dout_QTD.astype(dtype)
  score_MQT, inverse_MT = _scores(query_QD, slots, count, eps)
  weight_MQT = _weights(score_MQT, lse_QT)
  product_MQT = jnp.stack(
    [jnp.sum(dout_QTD * slot[None], axis=-1) for slot in slots]
  )
  mean_QT = jnp.sum(weight_MQT * product_MQT, axis=0)
  dscore_MQT = weight_MQT * (product_MQT + (dlse_QT - mean_QT)[None])
  # An invalid slot's score is -inf and its weight 0: keep it out of the sum.
  scored_MQT = jnp.where(weight_MQT > 0, dscore_MQT * score_MQT, 0)
  norm_MT = inverse_MT**2 * jnp.sum(scored_MQT, axis=1) / width
  pull_MQT = dscore_MQT * inverse_MT[:, None]

  dquery_QD = jnp.zeros_like(query_QD)
  dsources = []
  for i, slot in enumerate(slots):
    dquery_QD += jnp.einsum("q...,...d->qd", pull_MQT[i], slot)
    dsource = jnp.einsum("q...,qd->...d", pull_MQT[i], query_QD)
    dsource += jnp.sum(weight_MQT[i][..., None] * dout_QTD, axis=0)
    dsource -= norm_MT[i][..., None] * slot
    dsources.append(dsource.astype(_dtype(sources)))
  if isinstance(sources, tuple):
    return dquery_QD, tuple(dsources)
  return dquery_QD, jnp.stack(dsources)


def _dtype(sources):
  return sources[0].dtype if isinstance(sources, tuple) else sources.dtype


def _slots(sources, count, dtype):
  slots = []
  for i in range(len(sources)):
    slot = sources[i].astype(dtype)
    if count is not None:
      # Whatever an unused slot holds must not leak in, not even a NaN.
      slot = jnp.where(i < count, slot, 0)
    slots.append(slot)
  return slots


def _scores(query_QD, slots, count, eps):
  scores, inverses = [], []
  for slot in slots:
    inverse_T = jax.lax.rsqrt(jnp.mean(jnp.square(slot), axis=-1) + eps)
    product_QT = jnp.einsum(
      "qd,...d->q...", query_QD, slot, precision=jax.lax.Precision.HIGHEST
    )
    scores.append(product_QT * inverse_T[None])
    inverses.append(inverse_T)
  score_MQT = jnp.stack(scores)
  if count is not None:
    slot_M = jnp.arange(len(slots))
    slot_M = slot_M.reshape((-1,) + (1,) * (score_MQT.ndim - 1))
    score_MQT = jnp.where(slot_M < count, score_MQT, -jnp.inf)
  return score_MQT, jnp.stack(inverses)


def _weights(score_MQT, lse_QT):
  # exp(-inf - (-inf)) would be NaN: an empty set has zero weights.
  finite_QT = jnp.where(jnp.isfinite(lse_QT), lse_QT, 0)
  return jnp.exp(score_MQT - finite_QT[None])
