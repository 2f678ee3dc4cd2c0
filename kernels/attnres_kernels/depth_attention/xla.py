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
from typing import Any

import jax
import jax.numpy as jnp

from attnres_kernels import heads as heads_lib
from attnres_kernels.depth_attention import xla_bank

# Up to this many queries, a sum over queries is written out term by term, which
# the CPU compiler turns into one pass; with more queries, it is a broadcast.
_UNROLLED_QUERIES = 8


def forward(
  query_QD,
  sources,
  count,
  gain_D=None,
  *,
  eps,
  heads=1,
  rank=None,
  apart=False,
  norm_eps=None,
):
  """Returns the mixtures and their log-normalisers.

  With several heads, the log-normalisers are [Q, ..., H], and an axis Q of the
  scores in here has Q * H entries. A rank is the number of last coordinates
  that are the key. If `apart`, mixtures are a tuple of arrays [1, ..., D]. With
  a gain, the first mixture is normalised, and the inverse rms that it had is a
  third result.
  """
  options = dict(eps=eps, heads=heads, rank=rank)
  if count is None:
    out_QTD, *stats = _forward(query_QD, sources, gain_D, norm_eps, **options)
  else:
    out_QTD, *stats = xla_bank.forward(query_QD, sources, count, **options)
  if apart:
    return tuple(jax.lax.split(out_QTD, [1] * len(out_QTD))), *stats
  return out_QTD, *stats


def _forward(query_QD, sources, gain_D, norm_eps, *, eps, heads, rank):
  num_queries, width = query_QD.shape[0], sources[0].shape[-1]
  query_QD = heads_lib.separate(query_QD, heads)
  slots = [source.astype(query_QD.dtype) for source in sources]
  scores, _ = _scores(query_QD, slots, eps, rank)
  lse_TQ = _log_sum_exp(scores)
  weights = _weights(scores, lse_TQ)
  dtype = _dtype(sources)
  if num_queries <= _UNROLLED_QUERIES:
    out_QTD = jnp.stack(
      [
        _mixture(weights, slots, q, heads, width).astype(dtype)
        for q in range(num_queries)
      ]
    )
  else:
    out_QTD = _total(
      jnp.moveaxis(_all(weight_TQ, heads, width), -2, 0) * slot[None]
      for weight_TQ, slot in zip(weights, slots)
    ).astype(dtype)
  inverses = []
  if gain_D is not None:
    # Again, as it must not be rounded before its norm.
    mixture_TD = _mixture(weights, slots, 0, heads, width)
    mean_square_T = jnp.mean(jnp.square(mixture_TD), axis=-1)
    inverses.append(jax.lax.rsqrt(mean_square_T + norm_eps))
    normed_TD = mixture_TD * inverses[0][..., None]
    normed_TD = (normed_TD * xla_bank.row(gain_D, normed_TD)).astype(dtype)
    out_QTD = jnp.concatenate([normed_TD[None], out_QTD[1:]])
  if heads == 1:
    return out_QTD, jnp.moveaxis(lse_TQ, -1, 0), *inverses
  lse_TQH = lse_TQ.reshape(*lse_TQ.shape[:-1], num_queries, heads)
  return out_QTD, jnp.moveaxis(lse_TQH, -2, 0)


def backward(
  query_QD,
  sources,
  count,
  lse_QT,
  dout_QTD,
  dlse_QT,
  accumulate=None,
  gain_D=None,
  inverse_T: Any = None,
  *,
  eps,
  heads=1,
  rank=None,
  norm_eps=None,
):
  """Returns the gradients of the queries, of every source and of the gain.

  Source gradients are added to `accumulate` if it is given. The gradients of
  the mixtures may be in arrays of their own. A gain says that the first mixture
  is normalised, by the inverse rms that the forward pass returned; without it,
  it has no gradient either.
  """
  del norm_eps  # Part of the inverse rms.
  if isinstance(dout_QTD, tuple):
    dout_QTD = jnp.concatenate(dout_QTD)
  if count is not None:
    return xla_bank.backward(
      query_QD, sources, count, lse_QT, dout_QTD, dlse_QT, accumulate,
      eps=eps, heads=heads, rank=rank,
    )  # fmt: skip
  dtype = query_QD.dtype
  num_queries, key_width = query_QD.shape
  width = sources[0].shape[-1]
  separate_QD = heads_lib.separate(query_QD, heads)
  slots = [source.astype(dtype) for source in sources]
  dout_QTD = dout_QTD.astype(dtype)
  scores, inverses = _scores(separate_QD, slots, eps, rank)
  weights = _weights(scores, xla_bank.last(lse_QT, heads))
  # Large scores may differ from those of the forward pass, which sums in
  # another order: normalise again, so that the weights still sum to one.
  total_TQ = sum(weights)
  inverse_TQ = 1 / jnp.where(total_TQ == 0, 1, total_TQ)
  weights = [weight_TQ * inverse_TQ for weight_TQ in weights]

  dgains = []
  if gain_D is not None:
    # The mixture was not kept, and only its own queries score it.
    normed_TD = _mixture(weights, slots, 0, heads, width) * inverse_T[..., None]
    dnormed_TD = dout_QTD[0]
    axes = range(dnormed_TD.ndim - 1)
    dgains.append(jnp.sum(dnormed_TD * normed_TD, axis=tuple(axes)))
    dnormed_TD *= xla_bank.row(gain_D, dnormed_TD)
    along_T1 = jnp.mean(dnormed_TD * normed_TD, axis=-1, keepdims=True)
    dfirst_TD = (dnormed_TD - along_T1 * normed_TD) * inverse_T[..., None]
    dout_QTD = jnp.concatenate([dfirst_TD[None], dout_QTD[1:]])

  # <dout_q, v_i> per token. The copy puts a token's queries side by side.
  # Slices cost nothing here, because callers that unstack the mixtures pass a
  # concatenation.
  douts = [dout_QTD[q] for q in range(num_queries)]
  dout_TQD = jnp.stack(douts, axis=-2)
  products = [_products(dout_TQD, slot, heads) for slot in slots]
  mean_TQ = sum(
    weight_TQ * product_TQ for weight_TQ, product_TQ in zip(weights, products)
  )
  shift_TQ = xla_bank.last(dlse_QT, heads) - mean_TQ

  dsource_dtype = _dtype(sources if accumulate is None else accumulate)
  dquery_QD = jnp.zeros_like(separate_QD)
  dsources = []
  for i, slot in enumerate(slots):
    dscore_TQ = weights[i] * (products[i] + shift_TQ)
    pull_TQ = dscore_TQ * inverses[i][..., None]
    bend_T = inverses[i] ** 2 * jnp.sum(dscore_TQ * scores[i], axis=-1)
    bend_T /= key_width
    key = xla_bank.key_of(slot, rank)
    dquery_QD += jnp.einsum(
      "...q,...d->qd", pull_TQ, key, precision=jax.lax.Precision.HIGHEST
    )
    dsource = xla_bank.at_key(-bend_T[..., None] * key, width)
    if num_queries <= _UNROLLED_QUERIES:
      for q in range(num_queries):
        dsource += _one(weights[i], q, heads, width) * douts[q]
        pull = _one(pull_TQ, q, heads, width)
        dsource += xla_bank.at_key(
          pull * xla_bank.row(query_QD[q], slot), width
        )
    else:
      dsource += jnp.sum(_all(weights[i], heads, width) * dout_TQD, axis=-2)
      pulled = jnp.einsum(
        "...q,qd->...d", pull_TQ, separate_QD,
        precision=jax.lax.Precision.HIGHEST,
      )  # fmt: skip
      dsource += xla_bank.at_key(pulled, width)
    if accumulate is not None:
      dsource += accumulate[i].astype(dtype)
    dsources.append(dsource.astype(dsource_dtype))
  dquery_QD = heads_lib.join(dquery_QD, heads)
  if isinstance(sources, tuple):
    return dquery_QD, tuple(dsources), *dgains
  return dquery_QD, jnp.stack(dsources)


def _mixture(weights, slots, q, heads, width):
  """Of one query, not rounded."""
  return _total(
    _one(weight_TQ, q, heads, width) * slot
    for weight_TQ, slot in zip(weights, slots)
  )


def _products(dout_TQD, slot, heads):
  if heads > 1:
    product_TQH = heads_lib.totals(dout_TQD * slot[..., None, :], heads)
    return product_TQH.reshape(*slot.shape[:-1], -1)
  if dout_TQD.shape[-2] == 1:
    # A product of two vectors per token is faster as a sum than as a matrix.
    return jnp.sum(dout_TQD[..., 0, :] * slot, axis=-1)[..., None]
  return jnp.einsum(
    "...qd,...d->...q", dout_TQD, slot, precision=jax.lax.Precision.HIGHEST
  )


def _one(weight_TQ, q, heads, width):
  """Of one query, for each channel."""
  if heads == 1:
    return weight_TQ[..., q, None]
  of_heads = weight_TQ[..., q * heads : (q + 1) * heads]
  return heads_lib.spread(of_heads, heads, width)


def _all(weight_TQ, heads, width):
  """[..., Q, D], or [..., Q, 1] for one head."""
  weight_TQH = weight_TQ.reshape(*weight_TQ.shape[:-1], -1, heads)
  return heads_lib.spread(weight_TQH, heads, width)


def _total(terms):
  return functools.reduce(operator.add, terms)


def _dtype(sources):
  return sources[0].dtype if isinstance(sources, tuple) else sources.dtype


def _scores(query_QD, slots, eps, rank):
  scores, inverses = [], []
  for slot in slots:
    key = xla_bank.key_of(slot, rank)
    inverse_T = jax.lax.rsqrt(jnp.mean(jnp.square(key), axis=-1) + eps)
    score_TQ = jnp.einsum(
      "...d,qd->...q", key, query_QD, precision=jax.lax.Precision.HIGHEST
    )
    score_TQ *= inverse_T[..., None]
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
