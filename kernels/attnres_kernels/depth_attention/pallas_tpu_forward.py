# SPDX-License-Identifier: Apache-2.0
"""Depth attention on TPU, forward: one read of the sources.

With `v` of rows (source, token), see `pallas_tpu_tiles`:

  scores    query terms x v^T, one product for all queries of 16 tokens
  mixtures  weights x v per group, the weights [(query, token), (source,
            token)] on the token diagonal, in two bfloat16 terms
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attnres_kernels import dispatch
from attnres_kernels.depth_attention import pallas_tpu_columns as columns_lib
from attnres_kernels.depth_attention import pallas_tpu_tiles as tiles

_MASKED = -1e30  # Lower than any real score, yet finite.
# Up to this many rows of sources, twice, the terms of the weights fit side by
# side into the depth of a matrix unit; beyond, they become additional rows.
_STACKED_ROWS = 128


def forward(
  query_QD,
  sources,
  count,
  gain_D=None,
  *,
  eps,
  heads=1,
  rank=None,
  apart=False,
  norm_eps=None,
  interpret=False,
):
  """Returns the mixtures and their log-normalisers.

  If `apart`, the kernel writes each mixture to an array of its own, and the
  result is a tuple of arrays [1, ..., D]. With a gain, the first is normalised,
  and the inverse rms that it had is a third result.
  """
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
  gains = [] if gain_D is None else [gain_D[None]]
  stats = softmaxes + len(gains)
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
      columns=columns,
      eps=eps,
      norm_eps=norm_eps,
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(steps,),
      in_specs=[
        tiles.whole(terms),
        *map(tiles.whole, gains),
        *tiles.source_specs(sources, tile, width, lambda t: t),
      ],
      out_specs=[
        *out_specs,
        pl.BlockSpec((1, stats, tile), lambda t, n: (t, 0, 0)),
      ],
    ),
    out_shape=[
      *out_shapes,
      jax.ShapeDtypeStruct((steps, stats, tile), jnp.float32),
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
  )(tiles.count_operand(count, num_slots), terms, *gains, *flat)
  # Reshaped before, since compilers see no slice of a stack through a reshape.
  out = [x.reshape((-1,) + tokens_shape + (width,)) for x in out]
  lse = tiles.stats_from_tiles(lse, num_tokens)
  inverses = [row.reshape(tokens_shape) for row in lse[softmaxes:]]
  lse = columns_lib.from_kernel(lse[:softmaxes], heads, tokens_shape)
  return tuple(out) if apart else out[0], lse, *inverses


def _kernel(
  count_ref,
  terms_ref,
  *refs,
  num_slots,
  bank,
  num_tokens,
  columns,
  eps,
  norm_eps,
):
  normed = norm_eps is not None
  if normed:
    gain_ref, *refs = refs
  source_refs, out_refs, lse_ref = (
    refs[:num_slots],
    refs[num_slots:-1],
    refs[-1],
  )
  tile, softmaxes = out_refs[0].shape[-2], lse_ref.shape[1] - normed
  num_queries = softmaxes // columns.heads
  exact = out_refs[0].dtype == jnp.float32
  count = count_ref[0] if bank else None
  base = pl.program_id(0) * tile
  stacked = num_slots * tiles.GROUP <= _STACKED_ROWS
  groups, lses, inverses = [], [], []

  def write(query, rows, chunk, mixed):
    if len(out_refs[0].shape) == 3:
      out_refs[0][query, rows, chunk] = mixed
    else:
      out_refs[query][rows, chunk] = mixed

  def write_normed(rows, mixed):
    inverse = tiles.inverse_rms_of(mixed, columns.width, norm_eps)
    inverses.append(inverse)
    for piece, part in zip(columns.pieces, mixed):
      part *= inverse * gain_ref[:, piece.columns]
      write(0, rows, piece.columns, part.astype(out_refs[0].dtype))

  for first in range(0, tile, tiles.ROWS):
    # Scores need no diagonal: use whole row tiles, as in memory.
    load = functools.partial(
      tiles.load_sources,
      source_refs,
      slice(first, first + tiles.ROWS),
      tiles.kept_rows(num_tokens, tile, base + first, tiles.ROWS),
      bank,
    )
    raw = _raw_scores(load, terms_ref, columns, num_queries, exact)
    score = jnp.transpose(raw) * tiles.inverse_rms(load, columns, eps)
    score = score.reshape(num_slots, -1, tiles.GROUP, softmaxes)
    valid = tiles.valid_slots(score.shape, count)
    score = tiles.where(valid, score, _MASKED)
    top = jnp.max(score, axis=0)
    weight = tiles.where(valid, jnp.exp(score - top[None]), 0.0)
    total = jnp.sum(weight, axis=0)
    empty = total == 0.0
    safe = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(safe))
    lses.append(lse.reshape(tiles.ROWS, softmaxes))
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
      left = weight[:, half].reshape(-1, softmaxes)
      left = _diagonal_weights(left, exact, stacked)
      groups.append((slice(start, start + tiles.GROUP), load, left))

  # A second sweep, so that the statistics of all groups can overlap.
  for rows, load, weight in groups:
    firsts = []
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
      if count is not None:
        # An empty bank may hold anything, and 0 * NaN is NaN.
        mixed = jnp.where(count > 0, mixed, 0.0)
      if normed:
        firsts.append(mixed[: tiles.GROUP])
      mixed = mixed.astype(out_refs[0].dtype)
      mixed = mixed.reshape(num_queries, tiles.GROUP, -1)
      for query in range(normed, num_queries):
        write(query, rows, piece.columns, mixed[query])
    if normed:
      write_normed(rows, firsts)

  stats = jnp.concatenate(lses, axis=0)
  if normed:
    stats = jnp.concatenate([stats, jnp.concatenate(inverses, axis=0)], axis=1)
  lse_ref[0] = jnp.transpose(stats)


def _raw_scores(load, terms_ref, columns, num_queries, exact):
  """Products of queries and sources [J, M*16], without the norm of keys."""
  if columns.heads == 1:
    raw = tiles.total(
      tiles.dot(terms_ref[:, piece.key], load(piece.columns), 1, exact=exact)
      for piece in columns.keys
    )
    return tiles.sum_terms(raw, num_queries)
  raw = [0.0] * columns.heads
  for piece in columns.pieces:
    product = tiles.dot(
      terms_ref[:, piece.key], load(piece.columns), 1, exact=exact
    )
    product = tiles.sum_terms(product, columns.most * num_queries)
    for i, head in enumerate(piece.heads):
      raw[head] += columns_lib.rows_of(product, i, num_queries)
  return jnp.concatenate(raw, axis=0)


def _mixed(weight, source, num_queries, heads, exact, head):
  """Mixtures of one head in all columns of a piece: [Q*8, columns]."""
  rows = num_queries * tiles.GROUP
  # With the terms as rows, those of all heads are the second half.
  return tiles.total(
    tiles.dot(columns_lib.rows_of(weight, index, rows), source, exact=exact)
    for index in range(head, weight.shape[0] // rows, heads)
  )


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
