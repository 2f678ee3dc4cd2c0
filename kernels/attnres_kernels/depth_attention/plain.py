# SPDX-License-Identifier: Apache-2.0
"""Depth attention in plain JAX: one forward pass, differentiated by autodiff.

Written for the compiler's fusions: scores are one matrix product per source,
every wide array is written by one elementwise expression, and no source is
stacked. Statistics are float32 (float64 for float64 inputs) whatever the
sources are. Token axes are never merged, so that a sharded batch or sequence
axis keeps its sharding.
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


def _score(
  query_JD: jax.Array, source: jax.Array, eps: float, rank: int | None
) -> jax.Array:
  """Logits [..., J] of a wide source [..., D]."""
  key = source if rank is None else source[..., -rank:]
  inverse_T = jax.lax.rsqrt(jnp.mean(jnp.square(key), axis=-1) + eps)
  product_TJ = jnp.einsum(
    "...d,jd->...j", key, query_JD, precision=jax.lax.Precision.HIGHEST
  )
  return product_TJ * inverse_T[..., None]
