# SPDX-License-Identifier: Apache-2.0
"""Depth attention in plain JAX, with the formula of its gradient.

Written for the compiler's fusions: scores are one matrix product per source,
every wide array is written by one elementwise expression, and no source is
stacked. Statistics are float32 (float64 for float64 inputs) whatever the
sources are. Token axes are never merged, so that a sharded batch or sequence
axis keeps its sharding.

Autodiff of the forward pass would give the gradient M x Q expressions, each of
which is compiled; the formula gives it a few per source.
"""

import functools
import operator

import jax
import jax.numpy as jnp

from attnres_kernels import heads as heads_lib


def forward(
  query_QD: jax.Array, sources: tuple[jax.Array, ...], *, eps: float,
  heads: int = 1, rank: int | None = None,
) -> tuple[tuple[jax.Array, ...], jax.Array]:  # fmt: skip
  """Returns the mixtures, a tuple of Q arrays, and their log-normalisers.

  The log-normalisers are [Q, ..., H] with several heads. A rank is the number
  of last coordinates of a source that are its key.
  """
  num_queries, width = query_QD.shape[0], sources[0].shape[-1]
  separate_JD = heads_lib.separate(query_QD, heads)
  wide = [source.astype(query_QD.dtype) for source in sources]
  scores_MTJ = jnp.stack([_score(separate_JD, x, eps, rank) for x in wide])
  scores_MTQH = scores_MTJ.reshape(*scores_MTJ.shape[:-1], num_queries, heads)
  lse_TQH = jax.nn.logsumexp(scores_MTQH, axis=0)
  weights_MTQH = jax.nn.softmax(scores_MTQH, axis=0)
  mixtures = [
    functools.reduce(
      operator.add,
      (
        heads_lib.spread(weights_MTQH[m, ..., q, :], heads, width) * x
        for m, x in enumerate(wide)
      ),
    )
    for q in range(num_queries)
  ]
  lse_QTH = jnp.moveaxis(lse_TQH, -2, 0)
  return (
    tuple(mixture.astype(sources[0].dtype) for mixture in mixtures),
    jnp.squeeze(lse_QTH, -1) if heads == 1 else lse_QTH,
  )


def backward(
  query_QD: jax.Array, sources: tuple[jax.Array, ...], lse_QTH: jax.Array,
  douts: tuple[jax.Array, ...], dlse_QTH: jax.Array, *, eps: float,
  heads: int = 1, rank: int | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:  # fmt: skip
  """Returns the gradients of the queries and of every source.

  The weights are a softmax of the scores computed here, so that they sum to one
  even if a kernel summed the saved log-normalisers in another order.
  """
  del lse_QTH
  num_queries, width = query_QD.shape[0], sources[0].shape[-1]
  separate_JD = heads_lib.separate(query_QD, heads)
  wide = [source.astype(query_QD.dtype) for source in sources]
  keys = [x if rank is None else x[..., -rank:] for x in wide]
  scores_MTJ = jnp.stack([_score(separate_JD, x, eps, rank) for x in wide])
  shape_MTQH = *scores_MTJ.shape[:-1], num_queries, heads
  weights_MTQH = jax.nn.softmax(scores_MTJ.reshape(shape_MTQH), axis=0)
  dlse_QTH = dlse_QTH[..., None] if heads == 1 else dlse_QTH
  dlse_1TQH = jnp.moveaxis(dlse_QTH, 0, -2)[None]
  dout_TQD = jnp.stack(douts, axis=-2).astype(query_QD.dtype)
  products_MTQH = jnp.stack(
    [heads_lib.totals(dout_TQD * x[..., None, :], heads) for x in wide]
  )
  mean_1TQH = jnp.sum(weights_MTQH * products_MTQH, axis=0, keepdims=True)
  dscores_MTQH = weights_MTQH * (products_MTQH - mean_1TQH + dlse_1TQH)
  inverse_MT = jnp.stack([_inverse_rms(key, eps) for key in keys])
  pulls_MTJ = dscores_MTQH.reshape(scores_MTJ.shape) * inverse_MT[..., None]
  bends_MT = jnp.sum(pulls_MTJ * scores_MTJ, axis=-1) * inverse_MT
  bends_MT *= 1.0 / keys[0].shape[-1]

  def source_gradient(m: int) -> jax.Array:
    mixed = [
      heads_lib.spread(weights_MTQH[m, ..., q, :], heads, width)
      * dout_TQD[..., q, :]
      for q in range(num_queries)
    ]
    scored = jnp.einsum(
      "...j,jd->...d", pulls_MTJ[m], separate_JD,
      precision=jax.lax.Precision.HIGHEST,
    )  # fmt: skip
    scored -= bends_MT[m][..., None] * keys[m]
    hidden = width - scored.shape[-1]
    if hidden:
      scored = jnp.pad(scored, [(0, 0)] * (scored.ndim - 1) + [(hidden, 0)])
    return (functools.reduce(operator.add, mixed) + scored).astype(
      sources[m].dtype
    )

  dseparate_JD = functools.reduce(
    operator.add,
    (
      jnp.einsum(
        "...j,...d->jd", pull_TJ, key, precision=jax.lax.Precision.HIGHEST
      )
      for pull_TJ, key in zip(pulls_MTJ, keys)
    ),
  )
  dquery_QD = heads_lib.joined(dseparate_JD, heads)
  return dquery_QD, tuple(map(source_gradient, range(len(sources))))


def _score(
  query_JD: jax.Array, source: jax.Array, eps: float, rank: int | None
) -> jax.Array:
  """Logits [..., J] of a wide source [..., D]."""
  key = source if rank is None else source[..., -rank:]
  product_TJ = jnp.einsum(
    "...d,jd->...j", key, query_JD, precision=jax.lax.Precision.HIGHEST
  )
  return product_TJ * _inverse_rms(key, eps)[..., None]


def _inverse_rms(key: jax.Array, eps: float) -> jax.Array:
  return jax.lax.rsqrt(jnp.mean(jnp.square(key), axis=-1) + eps)
