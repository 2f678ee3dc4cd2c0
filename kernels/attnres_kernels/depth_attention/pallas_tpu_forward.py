# SPDX-License-Identifier: Apache-2.0
"""Depth attention on TPU, forward: one read of the sources.

With `v` of rows (source, token), see `pallas_tpu_tiles`:

  scores    query terms x v^T, one product for all queries of 16 tokens
  mixtures  weights x v per 8 tokens, the weights [(query, token), (source,
            token)] on the token diagonal, in two bfloat16 terms
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attnres_kernels import dispatch
from attnres_kernels.depth_attention import pallas_tpu_tiles as tiles

_MASKED = -1e30  # Lower than any real score, yet finite.
# Up to this many sources, the terms of the weights fit side by side into the
# depth of a matrix unit; with more sources, they become additional rows.
_STACKED_SOURCES = 16


def forward(query_QD, sources, count, *, eps, apart=False, interpret=False):
  """Returns the mixtures and their log-normalisers.

  If `apart`, the kernel writes each mixture to an array of its own.
  """
  tokens_shape, flat, num_tokens = tiles.flatten(sources)
  num_slots = len(sources)
  num_queries, width = query_QD.shape
  dtype = sources[0].dtype
  token_bytes = (num_slots + num_queries) * width * dtype.itemsize
  blocks = tiles.BlockSizes.choose(num_tokens, width, token_bytes)
  tile = blocks.tokens
  steps = pl.cdiv(num_tokens, tile)
  terms = tiles.query_terms(query_QD, dtype)
  one = jax.ShapeDtypeStruct((num_tokens, width), dtype)
  out_specs = [pl.BlockSpec((tile, width), lambda t, n: (t, 0))] * num_queries
  out_shapes = [one] * num_queries
  if not apart:
    out_specs = [
      pl.BlockSpec((num_queries, tile, width), lambda t, n: (0, t, 0))
    ]
    out_shapes = [jax.ShapeDtypeStruct((num_queries, *one.shape), dtype)]
  *out, lse = pl.pallas_call(
    functools.partial(
      _kernel,
      num_slots=num_slots,
      bank=not isinstance(sources, tuple),
      num_tokens=num_tokens,
      lanes=blocks.lanes,
      eps=eps,
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(steps,),
      in_specs=[
        tiles.whole(terms),
        *tiles.source_specs(sources, tile, width, lambda t: t),
      ],
      out_specs=[
        *out_specs,
        pl.BlockSpec((1, num_queries, tile), lambda t, n: (t, 0, 0)),
      ],
    ),
    out_shape=[
      *out_shapes,
      jax.ShapeDtypeStruct((steps, num_queries, tile), jnp.float32),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel",),
      vmem_limit_bytes=dispatch.TPU_VMEM_BYTES,
    ),
    cost_estimate=tiles.cost(
      4, num_queries, num_slots, num_tokens, width, token_bytes
    ),
    interpret=interpret,
    name="depth_attention_forward",
  )(tiles.count_operand(count, num_slots), terms, *flat)
  # Reshaped before, since compilers see no slice of a stack through a reshape.
  out = [x.reshape((-1,) + tokens_shape + (width,)) for x in out]
  return (
    jnp.concatenate(out) if apart else out[0],
    tiles.stats_from_tiles(lse, num_tokens).reshape(
      (num_queries,) + tokens_shape
    ),
  )


def _kernel(
  count_ref, terms_ref, *refs, num_slots, bank, num_tokens, lanes, eps
):
  source_refs, out_refs, lse_ref = (
    refs[:num_slots],
    refs[num_slots:-1],
    refs[-1],
  )
  *_, tile, width = out_refs[0].shape
  num_queries = lse_ref.shape[1]
  exact = out_refs[0].dtype == jnp.float32
  count = count_ref[0] if bank else None
  base = pl.program_id(0) * tile
  chunks = tiles.chunks(width, lanes)
  stacked = num_slots <= _STACKED_SOURCES
  groups, lses = [], []
  for first in range(0, tile, tiles.ROWS):
    # Scores need no diagonal: use whole row tiles, as in memory.
    load = functools.partial(
      tiles.load_sources,
      source_refs,
      slice(first, first + tiles.ROWS),
      tiles.kept_rows(num_tokens, tile, base + first, tiles.ROWS),
      bank,
    )
    raw = tiles.total(
      tiles.dot(terms_ref[:, chunk], load(chunk), 1, exact=exact)
      for chunk in chunks
    )
    raw = tiles.total(
      raw[term : term + num_queries]
      for term in range(0, raw.shape[0], num_queries)
    )
    score = jnp.transpose(raw) * tiles.inverse_rms(load, chunks, width, eps)
    score = score.reshape(num_slots, -1, tiles.GROUP, num_queries)
    valid = tiles.valid_slots(score.shape, count)
    score = tiles.where(valid, score, _MASKED)
    top = jnp.max(score, axis=0)
    weight = tiles.where(valid, jnp.exp(score - top[None]), 0.0)
    total = jnp.sum(weight, axis=0)
    empty = total == 0.0
    safe = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(safe))
    lses.append(lse.reshape(tiles.ROWS, num_queries))
    weight = weight / safe[None]
    for half in range(tiles.ROWS // tiles.GROUP):
      start = first + half * tiles.GROUP
      load = functools.partial(
        tiles.load_sources,
        source_refs,
        slice(start, start + tiles.GROUP),
        tiles.kept_rows(num_tokens, tile, base + start, tiles.GROUP),
        bank,
      )
      left = weight[:, half].reshape(-1, num_queries)
      left = _diagonal_weights(left, exact, stacked)
      groups.append((slice(start, start + tiles.GROUP), load, left))
  lse_ref[0] = jnp.transpose(jnp.concatenate(lses, axis=0))

  # A second sweep, so that the statistics of all groups can overlap.
  for rows, load, weight in groups:
    for chunk in chunks:
      source = load(chunk)
      if not exact and stacked:
        source = jnp.concatenate([source, source], axis=0)
      mixed = tiles.dot(weight, source, exact=exact)
      if not exact and not stacked:
        half = num_queries * tiles.GROUP
        mixed = mixed[:half] + mixed[half:]
      if count is not None:
        # An empty bank may hold anything, and 0 * NaN is NaN.
        mixed = jnp.where(count > 0, mixed, 0.0)
      mixed = mixed.astype(out_refs[0].dtype)
      mixed = mixed.reshape(num_queries, tiles.GROUP, -1)
      if len(out_refs[0].shape) == 3:
        out_refs[0][:, rows, chunk] = mixed
      else:
        for query, out_ref in enumerate(out_refs):
          out_ref[rows, chunk] = mixed[query]


def _diagonal_weights(weight, exact, stacked):
  """[M*8, Q] to the left operand of the mixtures, rows (query, token).

  Columns are (source, token). If `stacked`, they hold the high and then the low
  terms; otherwise the low terms are rows below the high terms.
  """
  if exact:
    return _spread_queries(weight)
  high, low = tiles.high_and_low(weight)
  if stacked:
    both = _spread_queries(jnp.concatenate([high, low], axis=0))
  else:
    both = jnp.concatenate([_spread_queries(x) for x in (high, low)], axis=0)
  return both.astype(jnp.bfloat16)


def _spread_queries(x):
  """[(source, token), Q] to [(query, token), (source, token)]."""
  turned = jnp.transpose(x)
  shape = (tiles.GROUP, turned.shape[1])
  mask = tiles.on_diagonal(tiles.iota(shape, 0), tiles.iota(shape, 1))
  return jnp.concatenate(
    [
      jnp.where(mask, jnp.broadcast_to(turned[q : q + 1], shape), 0.0)
      for q in range(turned.shape[0])
    ],
    axis=0,
  )
