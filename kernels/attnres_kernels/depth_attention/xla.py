# SPDX-License-Identifier: Apache-2.0
"""Depth attention in plain JAX, forward and backward by hand.

Written for the compiler's fusions: scores are one matrix product per source,
every wide array is written by one elementwise expression, and nothing is
stacked along the sources. Statistics are float32 (float64 for float64 inputs)
whatever the sources are. Token axes are never merged, so that a sharded batch
or sequence axis keeps its sharding.
"""

import functools
import operator

import jax
import jax.numpy as jnp

# Up to this many queries, a sum over queries is written out term by term, which
# the CPU compiler turns into one pass; with more queries, it is a broadcast.
_UNROLLED_QUERIES = 8


def forward(query_QD, sources, count, *, eps):
  """Returns the mixtures and their log-normalisers."""
  num_queries = query_QD.shape[0]
  slots = _slots(sources, count, query_QD.dtype)
  scores, _ = _scores(query_QD, slots, count, eps)
  lse_TQ = _log_sum_exp(scores)
  weights = _weights(scores, lse_TQ)
  dtype = _dtype(sources)
  if num_queries <= _UNROLLED_QUERIES:
    out_QTD = jnp.stack(
      [
        _total(
          weight_TQ[..., q, None] * slot
          for weight_TQ, slot in zip(weights, slots)
        ).astype(dtype)
        for q in range(num_queries)
      ]
    )
  else:
    out_QTD = _total(
      jnp.moveaxis(weight_TQ, -1, 0)[..., None] * slot[None]
      for weight_TQ, slot in zip(weights, slots)
    ).astype(dtype)
  return out_QTD, jnp.moveaxis(lse_TQ, -1, 0)


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
):
  """Returns the gradients of the queries and of every source.

  Source gradients are added to `accumulate` if it is given.
  """
  dtype = query_QD.dtype
  num_queries, width = query_QD.shape
  slots = _slots(sources, count, dtype)
  dout_QTD = dout_QTD.astype(dtype)
  scores, inverses = _scores(query_QD, slots, count, eps)
  weights = _weights(scores, jnp.moveaxis(lse_QT, 0, -1))
  # Large scores may differ from those of the forward pass, which sums in
  # another order: normalise again, so that the weights still sum to one.
  total_TQ = sum(weights)
  inverse_TQ = 1 / jnp.where(total_TQ == 0, 1, total_TQ)
  weights = [weight_TQ * inverse_TQ for weight_TQ in weights]

  # <dout_q, v_i> per token. The copy puts a token's queries side by side.
  # Slices cost nothing here, because callers that unstack the mixtures pass a
  # concatenation.
  douts = [dout_QTD[q] for q in range(num_queries)]
  dout_TQD = jnp.stack(douts, axis=-2)
  products = [_products(dout_TQD, slot) for slot in slots]
  mean_TQ = sum(
    weight_TQ * product_TQ for weight_TQ, product_TQ in zip(weights, products)
  )
  shift_TQ = jnp.moveaxis(dlse_QT, 0, -1) - mean_TQ

  dsource_dtype = _dtype(sources if accumulate is None else accumulate)
  dquery_QD = jnp.zeros_like(query_QD)
  dsources = []
  for i, slot in enumerate(slots):
    dscore_TQ = weights[i] * (products[i] + shift_TQ)
    pull_TQ = dscore_TQ * inverses[i][..., None]
    # An invalid slot has score -inf and weight 0: keep 0 * inf out of the sum.
    scored_TQ = dscore_TQ * scores[i]
    if count is not None:
      scored_TQ = jnp.where(i < count, scored_TQ, 0)
    bend_T = inverses[i] ** 2 * jnp.sum(scored_TQ, axis=-1) / width
    dquery_QD += jnp.einsum(
      "...q,...d->qd", pull_TQ, slot, precision=jax.lax.Precision.HIGHEST
    )
    dsource = -bend_T[..., None] * slot
    if num_queries <= _UNROLLED_QUERIES:
      for q in range(num_queries):
        dsource += weights[i][..., q, None] * douts[q]
        dsource += pull_TQ[..., q, None] * _row(query_QD[q], slot)
    else:
      dsource += jnp.sum(weights[i][..., None] * dout_TQD, axis=-2)
      dsource += jnp.einsum(
        "...q,qd->...d", pull_TQ, query_QD, precision=jax.lax.Precision.HIGHEST
      )
    if accumulate is not None:
      dsource += accumulate[i].astype(dtype)
    dsources.append(dsource.astype(dsource_dtype))
  if isinstance(sources, tuple):
    return dquery_QD, tuple(dsources)
  return dquery_QD, jnp.stack(dsources)


def _products(dout_TQD, slot):
  if dout_TQD.shape[-2] == 1:
    # A product of two vectors per token is faster as a sum than as a matrix.
    return jnp.sum(dout_TQD[..., 0, :] * slot, axis=-1)[..., None]
  return jnp.einsum(
    "...qd,...d->...q", dout_TQD, slot, precision=jax.lax.Precision.HIGHEST
  )


def _total(terms):
  return functools.reduce(operator.add, terms)


def _dtype(sources):
  return sources[0].dtype if isinstance(sources, tuple) else sources.dtype


def _slots(sources, count, dtype):
  slots = []
  for i in range(len(sources)):
    slot = sources[i].astype(dtype)
    if count is not None:
      # The contents of an unused slot must not leak in, not even a NaN.
      slot = jnp.where(i < count, slot, 0)
    slots.append(slot)
  return slots


def _scores(query_QD, slots, count, eps):
  scores, inverses = [], []
  for i, slot in enumerate(slots):
    inverse_T = jax.lax.rsqrt(jnp.mean(jnp.square(slot), axis=-1) + eps)
    score_TQ = jnp.einsum(
      "...d,qd->...q", slot, query_QD, precision=jax.lax.Precision.HIGHEST
    )
    score_TQ *= inverse_T[..., None]
    if count is not None:
      score_TQ = jnp.where(i < count, score_TQ, -jnp.inf)
    scores.append(score_TQ)
    inverses.append(inverse_T)
  return scores, inverses


def _log_sum_exp(scores):
  top_TQ = scores[0]
  for score_TQ in scores[1:]:
    top_TQ = jnp.maximum(top_TQ, score_TQ)
  # With no valid source every score is -inf: shift by 0, not by -inf.
  top_TQ = jnp.where(jnp.isfinite(top_TQ), top_TQ, 0)
  # log 0 = -inf is the right answer for an empty set.
  return top_TQ + jnp.log(sum(jnp.exp(score - top_TQ) for score in scores))


def _weights(scores, lse_TQ):
  # exp(-inf - -inf) would be NaN: an empty set has zero weights.
  finite_TQ = jnp.where(jnp.isfinite(lse_TQ), lse_TQ, 0)
  return [jnp.exp(score_TQ - finite_TQ) for score_TQ in scores]


def _row(x_D, like_TD):
  return x_D.reshape((1,) * (like_TD.ndim - 1) + (-1,))
