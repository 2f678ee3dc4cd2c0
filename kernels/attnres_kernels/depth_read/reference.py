# SPDX-License-Identifier: Apache-2.0
"""A read from the paper's Eq. 2-4, then the norm: simple and slow."""

import jax
import jax.numpy as jnp

from attnres_kernels import dispatch
from attnres_kernels.depth_attention import reference
from attnres_kernels.depth_read import terms


def forward(queries_LD, gain_D, *sources, row, eps, norm_eps, sizes=None):
  """rms_norm(mixture) * gain, in the dtype of the first source."""
  dtype = dispatch.accumulator(queries_LD, *sources)
  query_1D = queries_LD[row][None].astype(dtype)
  source_MTD = jnp.stack(
    [
      terms.total([x.astype(dtype) for x in group])
      for group in terms.grouped(sources, sizes)
    ]
  )
  mixed_1TD, _ = reference.attend(query_1D, source_MTD, None, eps=eps)
  mixed_TD = mixed_1TD[0]
  mean_square = jnp.mean(jnp.square(mixed_TD), axis=-1, keepdims=True)
  normed_TD = mixed_TD * jax.lax.rsqrt(mean_square + norm_eps)
  gain_TD = jnp.broadcast_to(gain_D.astype(dtype), normed_TD.shape)
  return (normed_TD * gain_TD).astype(sources[0].dtype)
