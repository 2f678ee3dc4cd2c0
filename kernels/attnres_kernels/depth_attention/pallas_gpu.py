# SPDX-License-Identifier: Apache-2.0
"""Depth attention on Nvidia GPUs (Hopper on), in Pallas Mosaic GPU.

Forward: one warpgroup per token, the row of a source spread over its threads,
scores as full sums, an online softmax over the sources with one float32
accumulator per query in registers. Registers bound the queries of one pass;
more queries take more passes, each of which reads the sources again.

The backward pass is the plain-JAX one. Nothing here has run on a GPU yet:
values are checked in interpret mode, lowering for an H200 on CPU; so the
automatic choice on GPU stays with plain JAX.
"""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from attnres_kernels.depth_attention import xla

_THREADS = 128
_REGISTERS = 120  # Of 255 per thread, for queries and their accumulators.


def why_not(function, query_QD, sources, count, *args, eps):
  """The reason why these arguments cannot run, or None."""
  del function, args, eps
  width = query_QD.shape[-1]
  if jax.__version_info__ < (0, 11):
    return f"needs jax >= 0.11 for Mosaic GPU, this is {jax.__version__}"
  if sources[0].dtype not in (jnp.bfloat16, jnp.float32):
    return f"sources must be bfloat16 or float32, got {sources[0].dtype}"
  if query_QD.dtype != jnp.float32:
    return f"queries must be float32, got {query_QD.dtype}"
  if width % _THREADS:
    return f"the width must be a multiple of {_THREADS}, got {width}"
  if 2 * width > _REGISTERS * _THREADS:
    return f"width {width} does not fit the registers of a warpgroup"
  if count is not None:
    return "a bank with a count is not supported"
  return None


def forward(query_QD, sources, count, *, eps, interpret=None):
  """Returns the mixtures and their log-normalisers."""
  del count
  num_queries, width = query_QD.shape
  shape = sources[0].shape
  num_tokens = sources[0].size // width
  flat = [source.reshape(num_tokens, width) for source in sources]
  chunk = max(1, _REGISTERS * _THREADS // (2 * width))
  parts = [
    _forward(query_QD[i : i + chunk], flat, eps, interpret)
    for i in range(0, num_queries, chunk)
  ]
  out_QTD = jnp.concatenate([out for out, _ in parts])
  lse_QT = jnp.concatenate([lse for _, lse in parts])
  return (
    out_QTD.reshape((num_queries,) + shape),
    lse_QT.reshape((num_queries,) + shape[:-1]),
  )


def backward(*args, eps, interpret=None):
  """Returns the gradients of the queries and of every source."""
  del interpret
  return xla.backward(*args, eps=eps)


def _forward(query_QD, sources, eps, interpret):
  num_queries, width = query_QD.shape
  num_tokens, num_sources = sources[0].shape[0], len(sources)
  # Two neighbours per thread where they fill the warpgroup evenly.
  pair = 2 if width % (2 * _THREADS) == 0 else 1
  layout = plgpu.Layout.WG_STRIDED((width,), vec_size=pair)

  def kernel(query_ref, *refs):
    source_refs = refs[:num_sources]
    out_ref, lse_ref = refs[num_sources:]
    token = jax.lax.axis_index("token")

    def load(ref):
      # Takes an index, too, in the jax 0.10 that this kernel refuses.
      whole: Any = plgpu.load
      return whole(ref, layout=layout, optimized=False)

    queries = [load(query_ref.at[q]) for q in range(num_queries)]
    state = [None] * num_queries
    for source_ref in source_refs:
      source = load(source_ref.at[token]).astype(jnp.float32)
      square = jnp.sum(source * source)
      inverse = jax.lax.rsqrt(square * (1.0 / width) + eps)
      for q, query in enumerate(queries):
        score = jnp.sum(query * source) * inverse
        if state[q] is None:
          state[q] = score, jnp.float32(1.0), source
          continue
        top, total, mixed = state[q]
        higher = jnp.maximum(top, score)
        old, new = jnp.exp(top - higher), jnp.exp(score - higher)
        state[q] = higher, total * old + new, mixed * old + source * new
    for q, (top, total, mixed) in enumerate(state):
      mixed = (mixed * (1.0 / total)).astype(out_ref.dtype)
      out_ref[q, token] = plgpu.layout_cast(mixed, layout)
      lse_ref[q, token] = top + jnp.log(total)

  options = {} if interpret is None else {"interpret": interpret}
  call = plgpu.kernel(
    kernel,
    out_type=[
      jax.ShapeDtypeStruct((num_queries, num_tokens, width), sources[0].dtype),
      jax.ShapeDtypeStruct((num_queries, num_tokens), jnp.float32),
    ],
    grid=(num_tokens,),
    grid_names=("token",),
    **options,
  )
  return call(query_QD, *sources)
