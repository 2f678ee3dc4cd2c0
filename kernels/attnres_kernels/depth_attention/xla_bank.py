# SPDX-License-Identifier: Apache-2.0
"""Depth attention over a bank in plain JAX: loops over its valid slots.

The program does not grow with the bank, and its work grows with the number of
valid slots, which is known at run time only. A step of a loop takes a few slots
together, so that the mixtures, which stay in memory between steps, are read and
written less often. Statistics are float32 (float64 for float64 inputs).
"""

import jax
import jax.numpy as jnp

from attnres_kernels import heads as heads_lib

# Slots per step. The mixtures of all queries are read and written once per
# step; up to so many slots less one are multiplied by zero in the last one.
_SLOTS = 4
# Up to this many queries, sums over queries are written out, as in `xla`.
_UNROLLED_QUERIES = 8
_EXACT = jax.lax.Precision.HIGHEST


def forward(query_QD, bank, count, *, eps, heads=1, rank=None):
  """As `xla.forward`, for a bank [M, ..., D] of `count` valid slots."""
  num_queries, width = query_QD.shape[0], bank.shape[-1]
  query_QD = heads_lib.separate(query_QD, heads)
  dtype = query_QD.dtype
  size = min(_SLOTS, bank.shape[0])

  def score(i, scores_MTQ):
    first = _first(bank, i, size)
    slots = _cut(bank, first, size).astype(dtype)
    scores, _ = _scores(query_QD, slots, eps, rank)
    scores = jnp.where(_below(first, size, count, scores), scores, -jnp.inf)
    return jax.lax.dynamic_update_slice_in_dim(scores_MTQ, scores, first, 0)

  steps = _steps(count, size)
  empty = jnp.full((*bank.shape[:-1], len(query_QD)), -jnp.inf, dtype)
  scores_MTQ = jax.lax.fori_loop(0, steps, score, empty)
  # With no valid slot every score is -inf: shift by 0, not by -inf.
  top_TQ = jnp.max(scores_MTQ, axis=0)
  top_TQ = jnp.where(jnp.isfinite(top_TQ), top_TQ, 0)
  lse_TQ = top_TQ + jnp.log(jnp.sum(jnp.exp(scores_MTQ - top_TQ[None]), axis=0))
  weight_MTQ = _weights(scores_MTQ, lse_TQ)

  def mix(i, out_QTD):
    first = _first(bank, i, size)
    slots = _cut(bank, first, size).astype(dtype)
    weights = _cut(weight_MTQ, first, size)
    for j in range(size):
      # The contents of an unused slot must not leak in, not even a NaN.
      new = _is_new(first + j, i, size, count)
      slot = jnp.where(new, slots[j], 0)
      weight_TQ = _by_query(weights[j], heads, width)
      out_QTD += jnp.moveaxis(weight_TQ, -2, 0) * slot[None]
    return out_QTD

  nothing = jnp.zeros((num_queries, *bank.shape[1:]), dtype)
  out_QTD = jax.lax.fori_loop(0, steps, mix, nothing).astype(bank.dtype)
  if heads == 1:
    return out_QTD, jnp.moveaxis(lse_TQ, -1, 0)
  lse_TQH = lse_TQ.reshape(*lse_TQ.shape[:-1], num_queries, heads)
  return out_QTD, jnp.moveaxis(lse_TQH, -2, 0)


def backward(
  query_QD,
  bank,
  count,
  lse_QT,
  dout_QTD,
  dlse_QT,
  accumulate=None,
  *,
  eps,
  heads=1,
  rank=None,
):
  """As `xla.backward`, for a bank; `accumulate` is updated in place."""
  dtype = query_QD.dtype
  key_width, width = query_QD.shape[-1], bank.shape[-1]
  separate_QD = heads_lib.separate(query_QD, heads)
  size, num_rows = min(_SLOTS, bank.shape[0]), len(separate_QD)
  dout_QTD = dout_QTD.astype(dtype)
  dout_TQD = jnp.moveaxis(dout_QTD, 0, -2)
  steps = _steps(count, size)

  def statistics(i, found):
    first = _first(bank, i, size)
    slots = _cut(bank, first, size).astype(dtype)
    scores, inverses = _scores(separate_QD, slots, eps, rank)
    scores = jnp.where(_below(first, size, count, scores), scores, -jnp.inf)
    products = _products(dout_TQD, slots, heads)
    products = jnp.where(_below(first, size, count, products), products, 0)
    return tuple(
      jax.lax.dynamic_update_slice_in_dim(old, new, first, 0)
      for old, new in zip(found, (scores, inverses, products))
    )

  empty_MTQ = jnp.zeros((*bank.shape[:-1], num_rows), dtype)
  empty_MT = jnp.zeros(bank.shape[:-1], dtype)
  scores_MTQ, inverse_MT, product_MTQ = jax.lax.fori_loop(
    0, steps, statistics, (empty_MTQ - jnp.inf, empty_MT, empty_MTQ)
  )
  lse_TQ = last(lse_QT, heads)
  weight_MTQ = _weights(scores_MTQ, lse_TQ)
  # Large scores may differ from those of the forward pass, which sums in
  # another order: normalise again, so that the weights still sum to one.
  total_TQ = jnp.sum(weight_MTQ, axis=0)
  weight_MTQ /= jnp.where(total_TQ == 0, 1, total_TQ)[None]
  mean_TQ = jnp.sum(weight_MTQ * product_MTQ, axis=0)
  shift_TQ = last(dlse_QT, heads) - mean_TQ
  dscore_MTQ = weight_MTQ * (product_MTQ + shift_TQ[None])
  pull_MTQ = dscore_MTQ * inverse_MT[..., None]
  # An unused slot has score -inf and weight 0: keep 0 * inf out of the sum.
  scored_MTQ = dscore_MTQ * jnp.where(weight_MTQ == 0, 0, scores_MTQ)
  bend_MT = inverse_MT**2 * jnp.sum(scored_MTQ, axis=-1) / key_width

  def gradients(i, found):
    dquery_QD, dbank = found
    first = _first(bank, i, size)
    new = first + jnp.arange(size, dtype=jnp.int32)
    new = (new >= i * size) & (new < count)

    def only_new(x):
      valid = new.reshape((size,) + (1,) * (x.ndim - 1))
      return jnp.where(valid, x, 0)

    # The contents of an unused slot must not leak in, not even a NaN.
    key = key_of(only_new(_cut(bank, first, size).astype(dtype)), rank)
    weights, pulls, bends = (
      only_new(_cut(x, first, size)) for x in (weight_MTQ, pull_MTQ, bend_MT)
    )
    dquery_QD += jnp.einsum("m...q,m...d->qd", pulls, key, precision=_EXACT)
    dslots = at_key(-bends[..., None] * key, width)
    if heads == 1 and num_rows <= _UNROLLED_QUERIES:
      for q in range(num_rows):
        dslots += weights[..., q, None] * dout_QTD[q][None]
        dslots += at_key(pulls[..., q, None] * row(separate_QD[q], key), width)
    else:
      weights_TQ = _by_query(weights, heads, width)
      dslots += jnp.sum(weights_TQ * dout_TQD[None], axis=-2)
      pulled = jnp.einsum("...q,qd->...d", pulls, separate_QD, precision=_EXACT)
      dslots += at_key(pulled, width)
    dslots += _cut(dbank, first, size).astype(dtype)
    return dquery_QD, jax.lax.dynamic_update_slice_in_dim(
      dbank, dslots.astype(dbank.dtype), first, 0
    )

  if accumulate is None:
    accumulate = jnp.zeros_like(bank)
  dquery_QD, dbank = jax.lax.fori_loop(
    0, steps, gradients, (jnp.zeros_like(separate_QD), accumulate)
  )
  return heads_lib.join(dquery_QD, heads), dbank


def _steps(count, size):
  return (count + size - 1) // size


def _first(bank, i, size):
  """The first slot of step i; the last step may repeat slots of the others."""
  return jnp.minimum(i * size, bank.shape[0] - size)


def _cut(x, first, size):
  return jax.lax.dynamic_slice_in_dim(x, first, size, 0)


def _is_new(slot, i, size, count):
  """Whether a slot is valid and belongs to no earlier step."""
  return (slot >= i * size) & (slot < count)


def _below(first, size, count, like):
  valid = first + jnp.arange(size, dtype=jnp.int32) < count
  return valid.reshape((size,) + (1,) * (like.ndim - 1))


def _scores(query_QD, slots, eps, rank):
  key = key_of(slots, rank)
  inverses = jax.lax.rsqrt(jnp.mean(jnp.square(key), axis=-1) + eps)
  scores = jnp.einsum("...d,qd->...q", key, query_QD, precision=_EXACT)
  return scores * inverses[..., None], inverses


def _weights(scores_MTQ, lse_TQ):
  # exp(-inf - -inf) would be NaN: an empty set has zero weights.
  finite_TQ = jnp.where(jnp.isfinite(lse_TQ), lse_TQ, 0)
  return jnp.exp(scores_MTQ - finite_TQ[None])


def _products(dout_TQD, slots, heads):
  """<dout_q, v_i> of each slot, query and, within it, head: [..., Q * H]."""
  products = dout_TQD[None] * slots[..., None, :]
  if heads == 1:
    return jnp.sum(products, axis=-1)
  product_TQH = heads_lib.totals(products, heads)
  return product_TQH.reshape(*slots.shape[:-1], -1)


def _by_query(weights, heads, width):
  """Weights [..., Q, D], or [..., Q, 1] for one head."""
  weight_TQH = weights.reshape(*weights.shape[:-1], -1, heads)
  return heads_lib.spread(weight_TQH, heads, width)


def last(lse_QT, heads):
  """[Q, ...] or [Q, ..., H] with queries, and then heads, in the last axis."""
  if heads == 1:
    return jnp.moveaxis(lse_QT, 0, -1)
  lse_TQH = jnp.moveaxis(lse_QT, 0, -2)
  return lse_TQH.reshape(*lse_TQH.shape[:-2], -1)


def key_of(slots, rank):
  """The coordinates of sources that are their keys, the last `rank`."""
  return slots if rank is None else slots[..., -rank:]


def at_key(dkey, width):
  """The gradient of a source, from that of its key."""
  missing = width - dkey.shape[-1]
  if not missing:
    return dkey
  return jnp.pad(dkey, [(0, 0)] * (dkey.ndim - 1) + [(missing, 0)])


def row(x_D, like_TD):
  """A vector with as many axes as an array."""
  return x_D.reshape((1,) * (like_TD.ndim - 1) + (-1,))
