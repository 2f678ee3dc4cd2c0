# SPDX-License-Identifier: Apache-2.0
"""A read and its norm on TPU: all sources of 16 tokens are on the core.

One kernel, whose only inputs are what the sublayers before it wrote: nothing is
padded, cut or cast in front of it, which for a few tokens costs more than the
read itself. The row of the queries is found by the kernel's copies. Scores and
mixture are two passes over sources that are on the core by then.
"""

import functools
import math

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attnres_kernels import dispatch
from attnres_kernels.depth_read import terms

_ROWS = 16  # A tile of bfloat16.
_SUBLANES = 8


def why_not(
  function, queries_LD, gain_D, *sources, row, eps, norm_eps, sizes=None
):
  """The reason why these arguments cannot run, or None."""
  del function, row, eps, norm_eps, sizes
  arrays = queries_LD, gain_D, *sources
  dtypes = {str(x.dtype) for x in arrays}
  if not dtypes <= {"bfloat16", "float32"}:
    return f"arrays must be bfloat16 or float32, got {sorted(dtypes)}"
  needed = 2 * _block_bytes(sources) + 2 * _ROWS * 4 * sources[0].shape[-1]
  if needed > dispatch.tpu_vmem_bytes():
    return (
      f"{_ROWS} tokens of {len(sources)} sources need {needed / 2**20:.0f} MiB"
    )
  return None


def forward(
  queries_LD, gain_D, *sources, row, eps, norm_eps, sizes=None, interpret=False
):
  """rms_norm(mixture) * gain, in the dtype of the first source."""
  shape, dtype = sources[0].shape, sources[0].dtype
  tokens, width = math.prod(shape[:-1]), shape[-1]
  tile = min(tokens, _ROWS)
  of_tokens = pl.BlockSpec((tile, width), lambda t: (t, 0))
  group = min(queries_LD.shape[0], _SUBLANES)
  normed_TD = pl.pallas_call(
    functools.partial(
      _kernel, row=row % group, eps=eps, norm_eps=norm_eps, sizes=sizes
    ),
    grid=(pl.cdiv(tokens, tile),),
    in_specs=[
      pl.BlockSpec((group, width), lambda t: (row // group, 0)),
      pl.BlockSpec((1, width), lambda t: (0, 0)),
      *(of_tokens for _ in sources),
    ],
    out_specs=of_tokens,
    out_shape=jax.ShapeDtypeStruct((tokens, width), dtype),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel",),
      vmem_limit_bytes=dispatch.tpu_vmem_bytes(),
    ),
    cost_estimate=pl.CostEstimate(
      flops=(6 * len(sources) + 5) * tokens * width,
      bytes_accessed=sum(x.nbytes for x in sources) + tokens * width * 2,
      transcendentals=(2 * len(sources) + 2) * tokens,
    ),
    interpret=interpret,
    name="depth_read_forward",
  )(queries_LD, gain_D[None], *(x.reshape(tokens, width) for x in sources))
  return normed_TD.reshape(shape)


def _kernel(query_ref, gain_ref, *refs, row, eps, norm_eps, sizes):
  *term_refs, normed_ref = refs
  sources = terms.grouped(term_refs, sizes)
  query = query_ref[row : row + 1, :]
  scores = []
  for refs in sources:
    x = _sum(refs)
    product = jnp.sum(x * query, axis=1, keepdims=True)
    scores.append(product * jax.lax.rsqrt(_mean(x * x) + eps))
  top = functools.reduce(jnp.maximum, scores)
  weights = [jnp.exp(score - top) for score in scores]
  share = 1.0 / functools.reduce(jnp.add, weights)
  mixed = functools.reduce(
    jnp.add,
    (
      (weight * share) * _sum(refs)
      for weight, refs in zip(weights, sources, strict=True)
    ),
  )
  normed = mixed * jax.lax.rsqrt(_mean(mixed * mixed) + norm_eps)
  normed_ref[...] = (normed * gain_ref[...]).astype(normed_ref.dtype)


def _sum(refs):
  return terms.total([ref[...].astype(jnp.float32) for ref in refs])


def _mean(x):
  return jnp.sum(x, axis=1, keepdims=True) * (1.0 / x.shape[1])


def _block_bytes(sources):
  return sum(_ROWS * x.shape[-1] * x.dtype.itemsize for x in sources)
