# SPDX-License-Identifier: Apache-2.0
"""Depth attention on TPU, forward: one read of the sources.

With `v` of rows (source, token), see `pallas_tpu_tiles`:

  scores    query terms x v^T, one product for all queries of 16 tokens
  mixtures  weights x v per group, the weights [(query, token), (source,
            token)] on the token diagonal, in two bfloat16 terms
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attnres_kernels import dispatch
from attnres_kernels.depth_attention import pallas_tpu_columns as columns_lib
from attnres_kernels.depth_attention import pallas_tpu_tiles as tiles

# Up to this many rows of sources, twice, the terms of the weights fit side by
# side into the depth of a matrix unit; beyond, they become additional rows.
_STACKED_ROWS = 128


def forward(
  query_QD: jax.Array, sources: tuple[jax.Array, ...], *, eps: float,
  heads: int = 1, rank: int | None = None, interpret: Any = False,
) -> tuple[tuple[jax.Array, ...], jax.Array]:  # fmt: skip
  """Returns the mixtures, a tuple of Q arrays, and their log-normalisers."""
  tokens_shape, flat, num_tokens = tiles.flatten(sources)
  num_slots = len(sources)
  num_queries, width = query_QD.shape[0], flat[0].shape[-1]
  dtype = sources[0].dtype
  token_bytes = (num_slots + num_queries) * width * dtype.itemsize
  blocks = tiles.BlockSizes.choose(num_tokens, width, token_bytes, heads)
  tile = blocks.tokens
  steps = pl.cdiv(num_tokens, tile)
  columns = columns_lib.Columns(width, blocks.lanes, heads, rank)
  terms = tiles.query_terms(columns.separate(query_QD), dtype)
  softmaxes = heads * num_queries
  one = jax.ShapeDtypeStruct((num_tokens, width), dtype)
  of_tokens = pl.BlockSpec((tile, width), lambda t: (t, 0))
  *out, lse = pl.pallas_call(
    functools.partial(
      _kernel,
      num_slots=num_slots,
      num_tokens=num_tokens,
      columns=columns,
      eps=eps,
    ),
    grid=(steps,),
    in_specs=[tiles.constant_spec(terms), *[of_tokens] * num_slots],
    out_specs=[
      *[of_tokens] * num_queries,
      pl.BlockSpec((1, softmaxes, tile), lambda t: (t, 0, 0)),
    ],
    out_shape=[
      *[one] * num_queries,
      jax.ShapeDtypeStruct((steps, softmaxes, tile), jnp.float32),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel",),
      vmem_limit_bytes=dispatch.tpu_vmem_limit(
        tile * token_bytes + terms.nbytes
      ),
    ),
    cost_estimate=tiles.cost(
      4, num_queries, num_slots, num_tokens, width, token_bytes
    ),
    interpret=interpret,
    name="depth_attention_forward",
  )(terms, *flat)
  out = tuple(x.reshape((*tokens_shape, width)) for x in out)
  lse = tiles.stats_from_tiles(lse, num_tokens)
  return out, columns_lib.from_kernel(lse, heads, tokens_shape)


def _kernel(
  terms_ref: Any, *refs: Any, num_slots: int, num_tokens: int,
  columns: columns_lib.Columns, eps: float,
) -> None:  # fmt: skip
  """Query terms [terms * J, D], M sources [tile, D].

  Then the results: Q mixtures [tile, D], log-normalisers [1, J, tile].
  """
  *source_and_out_refs, lse_ref = refs
  source_refs = source_and_out_refs[:num_slots]
  out_refs = source_and_out_refs[num_slots:]
  _, softmaxes, tile = lse_ref.shape
  num_queries = len(out_refs)
  exact = out_refs[0].dtype == jnp.float32
  base = pl.program_id(0) * tile
  stacked = num_slots * tiles.GROUP <= _STACKED_ROWS
  groups, lses = [], []

  for first in range(0, tile, tiles.ROWS):
    # Scores need no diagonal: use whole row tiles, as in memory.
    load = functools.partial(
      tiles.load_sources,
      source_refs,
      slice(first, first + tiles.ROWS),
      tiles.valid_rows(num_tokens, tile, base + first, tiles.ROWS),
    )
    raw = _raw_scores(load, terms_ref, columns, num_queries, exact)
    score = jnp.transpose(raw) * tiles.inverse_rms(load, columns, eps)
    score = score.reshape(num_slots, -1, tiles.GROUP, softmaxes)
    top = jnp.max(score, axis=0)
    weight = jnp.exp(score - top[None])
    total = jnp.sum(weight, axis=0)
    lses.append((top + jnp.log(total)).reshape(tiles.ROWS, softmaxes))
    weight = weight / total[None]
    for half in range(tiles.ROWS // tiles.GROUP):
      start = first + half * tiles.GROUP
      load = functools.partial(
        tiles.load_sources,
        source_refs,
        slice(start, start + tiles.GROUP),
        tiles.valid_rows(num_tokens, tile, base + start, tiles.GROUP),
      )
      left = weight[:, half].reshape(-1, softmaxes)
      left = _diagonal_weights(left, exact, stacked)
      groups.append((slice(start, start + tiles.GROUP), load, left))

  # A second sweep, so that the statistics of all groups can overlap.
  for rows, load, weight in groups:
    for piece in columns.pieces:
      source = load(piece.columns)
      if not exact and stacked:
        source = jnp.concatenate([source, source], axis=0)
      if columns.heads == 1:
        mixed = tiles.dot(weight, source, exact=exact)
        if not exact and not stacked:
          half = num_queries * tiles.GROUP
          mixed = mixed[:half] + mixed[half:]
      else:
        mixed = columns.select(
          piece,
          functools.partial(
            _mixed, weight, source, num_queries, columns.heads, exact
          ),
        )
      mixed = mixed.astype(out_refs[0].dtype)
      mixed = mixed.reshape(num_queries, tiles.GROUP, -1)
      for query, out_ref in enumerate(out_refs):
        out_ref[rows, piece.columns] = mixed[query]

  lse_ref[0] = jnp.transpose(jnp.concatenate(lses, axis=0))


def _raw_scores(
  load: Callable[[slice], jax.Array], terms_ref: Any,
  columns: columns_lib.Columns, num_queries: int, exact: bool,
) -> jax.Array:  # fmt: skip
  """Products of queries and sources [J, M*16], without the norm of keys."""
  if columns.heads == 1:
    raw = tiles.total(
      tiles.dot(terms_ref[:, piece.key], load(piece.columns), 1, exact=exact)
      for piece in columns.keys
    )
    return tiles.sum_terms(raw, num_queries)
  by_head: list[Any] = [0.0] * columns.heads
  for piece in columns.pieces:
    product = tiles.dot(
      terms_ref[:, piece.key], load(piece.columns), 1, exact=exact
    )
    product = tiles.sum_terms(product, columns.most * num_queries)
    for i, head in enumerate(piece.heads):
      by_head[head] += columns_lib.rows_of(product, i, num_queries)
  return jnp.concatenate(by_head, axis=0)


def _mixed(
  weight: jax.Array, source: jax.Array, num_queries: int, heads: int,
  exact: bool, head: int,
) -> jax.Array:  # fmt: skip
  """Mixtures of one head in all columns of a piece: [Q*8, columns]."""
  rows = num_queries * tiles.GROUP
  # With the terms as rows, the terms of all heads are the second half.
  return tiles.total(
    tiles.dot(columns_lib.rows_of(weight, index, rows), source, exact=exact)
    for index in range(head, weight.shape[0] // rows, heads)
  )


def _diagonal_weights(
  weight: jax.Array, exact: bool, stacked: bool
) -> jax.Array:
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


def _spread_queries(x: jax.Array) -> jax.Array:
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
