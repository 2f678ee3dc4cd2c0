# SPDX-License-Identifier: Apache-2.0
"""Phase 2 in plain JAX: one forward pass, differentiated by autodiff.

Two passes over a token's row are enough: one for the sums that determine the
weights, one that writes. All statistics are in the accumulation dtype.

At a zero partial sum, the inverse rms of its key is eps^(-1/2), 1000 by
default. Behind a pre-norm, the gradient of the score is zero up to rounding, so
the gradient of the partial sum has an error of up to about 1e-4 |query| times
that of the mixture (float32). A zero query, with which training starts, makes
the error zero.
"""

from collections.abc import Sequence
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from attnres_kernels import heads as heads_lib


def forward(
  out_TD: jax.Array, lse_T: jax.Array, query_D: jax.Array, partial: Any,
  gain_D: jax.Array | None, *, eps: float, norm_eps: float, heads: int = 1,
  rank: int | None = None,
) -> jax.Array:  # fmt: skip
  """Returns the merged mixture, normalised if there is a gain.

  With several heads, log-normalisers, scores and weights are [..., H].
  """
  dtype = query_D.dtype
  partials = [x.astype(dtype) for x in jax.tree.leaves(partial)]
  scores = [_score(x, query_D, eps, heads, rank) for x in partials]
  weights = (
    weight_T[..., None]
    if heads == 1
    else heads_lib.spread(weight_T, heads, out_TD.shape[-1])
    for weight_T in _softmax([lse_T, *scores])
  )
  mixed_TD = functools.reduce(
    operator.add,
    (w * x for w, x in zip(weights, [out_TD.astype(dtype), *partials])),
  )
  if gain_D is not None:
    mixed_TD *= _inverse_rms(mixed_TD, norm_eps)[..., None]
    mixed_TD *= _row(gain_D, mixed_TD)
  return mixed_TD.astype(out_TD.dtype)


def two_weights(
  lse_T: jax.Array, score_T: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Weights of the mixture and of the partial sum.

  Each is computed directly, so that the smaller one keeps its precision.
  """
  return jax.nn.sigmoid(lse_T - score_T), jax.nn.sigmoid(score_T - lse_T)


def _softmax(scores: Sequence[jax.Array]) -> Sequence[Any]:
  """The same of the mixture and several; the first score may be infinite."""
  if len(scores) == 2:
    return two_weights(*scores)

  def other(i: int, j: int) -> Any:
    return 1.0 if i == j else jnp.exp(scores[j] - scores[i])

  each = range(len(scores))
  return [
    1 / functools.reduce(operator.add, (other(i, j) for j in each))
    for i in each
  ]


def _score(
  partial_TD: jax.Array, query_D: jax.Array, eps: float, heads: int,
  rank: int | None,
) -> jax.Array:  # fmt: skip
  key_TD = partial_TD if rank is None else partial_TD[..., -rank:]
  inverse_T = _inverse_rms(key_TD, eps)
  if heads > 1:
    product_TH = heads_lib.totals(key_TD * _row(query_D, key_TD), heads)
    return product_TH * inverse_T[..., None]
  product_T = jnp.einsum(
    "...d,d->...", key_TD, query_D, precision=jax.lax.Precision.HIGHEST
  )
  return product_T * inverse_T


def _inverse_rms(x_TD: jax.Array, eps: float) -> jax.Array:
  return jax.lax.rsqrt(jnp.mean(jnp.square(x_TD), axis=-1) + eps)


def _row(x_D: jax.Array, like_TD: jax.Array) -> jax.Array:
  return x_D.astype(like_TD.dtype).reshape((1,) * (like_TD.ndim - 1) + (-1,))
