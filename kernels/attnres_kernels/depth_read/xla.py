# SPDX-License-Identifier: Apache-2.0
"""A read and its norm in plain JAX, without a copy of all sources."""

import jax
import jax.numpy as jnp

from attnres_kernels.depth_read import terms


def forward(queries_LD, gain_D, *sources, row, eps, norm_eps, sizes=None):
  """rms_norm(mixture) * gain, in the dtype of the first source."""
  dtype, out_dtype = queries_LD.dtype, sources[0].dtype
  sources = [
    terms.total([x.astype(dtype) for x in group])
    for group in terms.grouped(sources, sizes)
  ]
  query_D = queries_LD[row]
  scores = [_score(x, query_D, eps) for x in sources]
  top_T1 = scores[0]
  for score_T1 in scores[1:]:
    top_T1 = jnp.maximum(top_T1, score_T1)
  weights = [jnp.exp(score_T1 - top_T1) for score_T1 in scores]
  total_T1 = sum(weights[1:], weights[0])
  mixed_TD = jnp.zeros((), dtype)
  for weight_T1, x_TD in zip(weights, sources, strict=True):
    mixed_TD += weight_T1 * x_TD
  mixed_TD /= total_T1
  normed_TD = mixed_TD * jax.lax.rsqrt(_mean_square(mixed_TD) + norm_eps)
  return (normed_TD * _row(gain_D, normed_TD)).astype(out_dtype)


def _score(x_TD, query_D, eps):
  product_T1 = jnp.sum(x_TD * _row(query_D, x_TD), axis=-1, keepdims=True)
  return product_T1 * jax.lax.rsqrt(_mean_square(x_TD) + eps)


def _mean_square(x_TD):
  return jnp.mean(jnp.square(x_TD), axis=-1, keepdims=True)


def _row(x_D, like_TD):
  return jnp.reshape(x_D, (1,) * (like_TD.ndim - 1) + x_D.shape)
