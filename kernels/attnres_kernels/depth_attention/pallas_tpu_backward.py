# SPDX-License-Identifier: Apache-2.0
"""Depth attention on TPU, backward: one read of sources and output gradients.

Per group of tokens (see `pallas_tpu_tiles`), with `v` of rows (source, token)
and `dout` of rows (query, token):

  products   v x dout^T on the token diagonal, v x query^T for the scores
  dsources   weights x dout + pulls x query - bend * v, the first two as one
             product
  dquery     pulls^T x v

Scores are recomputed from sources and log-normalisers.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attnres_kernels import dispatch
from attnres_kernels.depth_attention import pallas_tpu_columns as columns_lib
from attnres_kernels.depth_attention import pallas_tpu_heads as heads_lib
from attnres_kernels.depth_attention import pallas_tpu_tiles as tiles

_MATRIX = 128  # Rows and columns of the smallest matrix unit.


def backward(
  query_QD: jax.Array, sources: tuple[jax.Array, ...], lse_QT: jax.Array,
  douts: tuple[jax.Array, ...], dlse_QT: jax.Array, *, eps: float,
  heads: int = 1, rank: int | None = None, interpret: Any = False,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:  # fmt: skip
  """Returns the gradients of the queries and of every source.

  `douts` are the gradients of the mixtures, a tuple of Q arrays.
  """
  _, flat, num_tokens = tiles.flatten(sources)
  num_slots = len(sources)
  num_queries, width = query_QD.shape[0], flat[0].shape[-1]
  dtype = sources[0].dtype
  token_bytes = (num_queries + 2 * num_slots) * width * dtype.itemsize
  blocks = tiles.BlockSizes.choose(num_tokens, width, token_bytes, heads)
  tile = blocks.tokens
  num_tiles = pl.cdiv(num_tokens, tile)
  # Every part of the outer axis sums its own query gradient, in order.
  parts = max(p for p in range(1, 9) if num_tiles % p == 0)
  steps = num_tiles // parts
  columns = columns_lib.Columns(width, blocks.lanes, heads, rank)
  terms = tiles.query_terms(columns.separate(query_QD), dtype)
  pull_terms = terms
  if heads > 1:
    pull_terms = tiles.query_terms(query_QD, dtype)
  pull_terms = tiles.pull_terms(pull_terms, num_queries)
  # High and low terms of the pulls are summed separately.
  exact = dtype == jnp.float32
  sums = (parts, (1 if exact else 2) * num_queries, terms.shape[1])
  lse, dlse = (
    columns_lib.to_kernel(x, heads, num_tokens)
    for x in (lse_QT, dlse_QT.astype(jnp.float32))
  )
  stats = [tiles.stats_to_tiles(x, tile) for x in (lse, dlse)]

  def at(p, s):
    return p * steps + s

  token_spec = pl.BlockSpec((tile, width), lambda p, s: (at(p, s), 0))
  stats_specs = [
    pl.BlockSpec((1, *x.shape[1:]), lambda p, s: (at(p, s), 0, 0))
    for x in stats
  ]
  douts = tuple(x.reshape(num_tokens, width).astype(dtype) for x in douts)
  fixed = terms.nbytes + pull_terms.nbytes + 4 * math.prod(sums[1:])
  dquery, *dsources = pl.pallas_call(
    functools.partial(
      _kernel,
      num_queries=num_queries,
      num_slots=num_slots,
      num_tokens=num_tokens,
      columns=columns,
      eps=eps,
    ),
    grid=(parts, steps),
    in_specs=[
      tiles.constant_spec(terms),
      tiles.constant_spec(pull_terms),
      *stats_specs,
      *[token_spec] * (num_queries + num_slots),
    ],
    out_specs=[
      pl.BlockSpec((1, *sums[1:]), lambda p, s: (p, 0, 0)),
      *[token_spec] * num_slots,
    ],
    out_shape=[
      jax.ShapeDtypeStruct(sums, jnp.float32),
      *[jax.ShapeDtypeStruct((num_tokens, width), dtype)] * num_slots,
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary"),
      vmem_limit_bytes=dispatch.tpu_vmem_limit(tile * token_bytes + fixed),
    ),
    cost_estimate=tiles.cost(
      10, num_queries, num_slots, num_tokens, width, token_bytes
    ),
    interpret=interpret,
    name="depth_attention_backward",
  )(terms, pull_terms, *stats, *douts, *flat)
  dquery = dquery.reshape(-1, num_queries, sums[-1]).sum(axis=0)
  dsources = tuple(d.reshape(sources[0].shape) for d in dsources)
  return columns.together(dquery), dsources


def _kernel(
  terms_ref: Any, pull_terms_ref: Any, lse_ref: Any, dlse_ref: Any, *refs: Any,
  num_queries: int, num_slots: int, num_tokens: int,
  columns: columns_lib.Columns, eps: float,
) -> None:  # fmt: skip
  """Terms of queries and pulls, lse and dlse [1, J, tile], then rows [tile, D].

  These are Q output gradients and M sources. Then the results: the query
  gradient [1, terms * Q, D], summed over steps, and M source gradients.
  """
  dout_refs, refs = refs[:num_queries], refs[num_queries:]
  source_refs, (dquery_ref, *dsource_refs) = refs[:num_slots], refs[num_slots:]
  tile = dout_refs[0].shape[0]
  exact = dout_refs[0].dtype == jnp.float32
  step = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
  softmaxes = num_queries * columns.heads

  @pl.when(pl.program_id(1) == 0)
  def _():
    dquery_ref[...] = jnp.zeros_like(dquery_ref)

  factors_of = None
  if columns.heads > 1:
    rows = num_slots * tiles.GROUP
    factors_of = heads_lib.Factors(rows, num_queries, columns.heads, exact)

  def inverse_rms(valid, load):
    inverse = tiles.inverse_rms(load, columns, eps)
    if valid is None:
      return inverse
    # Without an eps, it is infinite in rows of padding, which are zero.
    return jnp.where(jnp.concatenate([valid] * num_slots), inverse, 0.0)

  groups: list[Any] = []
  lse, dlse = jnp.transpose(lse_ref[0]), jnp.transpose(dlse_ref[0])
  for first in range(0, tile, tiles.GROUP):
    rows = slice(first, first + tiles.GROUP)
    base = step * tile + first
    valid = tiles.valid_rows(num_tokens, tile, base, tiles.GROUP)
    load = functools.partial(tiles.load_sources, source_refs, rows, valid)
    douts = functools.partial(tiles.load_sources, dout_refs, rows, valid)
    inverse = inverse_rms(valid, load)
    products_of = _products if columns.heads == 1 else heads_lib.products
    product, score = products_of(
      load, douts, terms_ref, columns, num_slots, num_queries, exact
    )
    product = tiles.on_slots(product)
    score = tiles.on_slots(score * inverse)
    weight = _weights(score, lse[rows])
    mean = jnp.sum(weight * product, axis=0)
    dscore = weight * (product + (dlse[rows] - mean)[None])
    flat = lambda x: x.reshape(-1, softmaxes)
    bend = jnp.sum(flat(dscore * score), axis=1, keepdims=True)
    bend = bend * inverse * inverse * (1.0 / columns.key_width)
    pull = flat(dscore) * inverse
    if factors_of is None:
      factors = [_factor(flat(weight), pull, exact)]
    else:
      factors = factors_of(flat(weight), pull)
    groups.append((rows, load, douts, bend, factors, pull))

  # A second sweep, so that the statistics of all groups can overlap.
  for rows, load, douts, bend, factors, _ in groups:
    for piece in columns.pieces:
      chunk = piece.columns
      dsource = _dsource(
        load(chunk), douts(chunk), pull_terms_ref, bend, factors, columns, piece
      )
      for i, dsource_ref in enumerate(dsource_refs):
        part = dsource[i * tiles.GROUP : (i + 1) * tiles.GROUP]
        dsource_ref[rows, chunk] = part.astype(dsource_ref.dtype)

  # The query gradient also sums over tokens: take as many groups at once as
  # fill the depth of a matrix unit.
  span = max(1, 2 * _MATRIX // (num_slots * tiles.GROUP))
  for first in range(0, len(groups), span):
    several = groups[first : first + span]
    pulls = [pull for *_, pull in several]
    pulls = _pull_rows(pulls, num_queries, exact)
    for piece in columns.pieces if columns.heads > 1 else columns.keys:
      sources = [load(piece.columns) for _, load, *_ in several]
      sources = jnp.concatenate(sources, axis=0)
      dquery = columns.select(
        piece,
        lambda h, pulls=pulls, x=sources: tiles.dot(pulls[h], x, exact=exact),
      )
      dquery_ref[0, :, piece.key] += dquery


def _weights(score: jax.Array, lse: jax.Array) -> jax.Array:
  """Weights of the sources of each token: [M, 8, Q]."""
  weight = jnp.exp(score - lse[None])
  # Large scores differ from the forward pass's, which sums in another
  # order: normalise again, so that the weights still sum to one.
  return weight / jnp.sum(weight, axis=0)[None]


def _products(
  load: Callable[[slice], jax.Array], douts: Callable[[slice], jax.Array],
  terms_ref: Any, columns: columns_lib.Columns, num_slots: int,
  num_queries: int, exact: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
  """Products of source rows with their token's dout and the query: [M*8, Q]."""
  diagonal = num_queries * tiles.GROUP
  product = _product_rows(
    load, douts, diagonal, terms_ref, columns, num_slots * tiles.GROUP, exact
  )
  token = lambda row: jnp.bitwise_and(row, tiles.GROUP - 1)
  return (
    tiles.take_columns(
      product, lambda r, i: i * tiles.GROUP + token(r), num_queries
    ),
    tiles.total(
      tiles.take_columns(product, lambda r, i, f=first: f + i, num_queries)
      for first in range(diagonal, diagonal + terms_ref.shape[0], num_queries)
    ),
  )


def _product_rows(
  load: Callable[[slice], jax.Array], partners: Callable[[slice], jax.Array],
  diagonal: int, terms_ref: Any, columns: columns_lib.Columns, source_rows: int,
  exact: bool,
) -> jax.Array:  # fmt: skip
  """Products of source rows with as many partners, and then query terms."""
  partner_rows = diagonal + terms_ref.shape[0]
  # Rows of the left operand stream; rows of the right operand are tiled.
  streams = source_rows * pl.cdiv(
    partner_rows, _MATRIX
  ) <= partner_rows * pl.cdiv(source_rows, _MATRIX)

  def partner(piece):
    rows = partners(piece.columns)
    if piece.key is None:
      return rows
    return jnp.concatenate([rows, terms_ref[:, piece.key]], axis=0)

  def multiply(piece):
    if streams:
      return tiles.dot(load(piece.columns), partner(piece), 1, exact=exact)
    return tiles.dot(partner(piece), load(piece.columns), 1, exact=exact)

  in_front = [multiply(p) for p in columns.pieces if p.key is None]
  product = tiles.total(map(multiply, columns.keys))
  if in_front:
    shape = product.shape
    more = tiles.total(in_front)
    axis = 1 if streams else 0
    rest = jax.lax.slice_in_dim(product, more.shape[axis], shape[axis], 1, axis)
    both = jax.lax.slice_in_dim(product, 0, more.shape[axis], 1, axis) + more
    product = jnp.concatenate([both, rest], axis=axis)
  if not streams:
    product = jnp.transpose(product)
  return product


def _dsource(
  source: jax.Array, dout: jax.Array, pull_terms_ref: Any, bend: jax.Array,
  factors: list[jax.Array], columns: columns_lib.Columns,
  piece: columns_lib.Piece,
) -> jax.Array:  # fmt: skip
  """Gradients of the sources in the columns of a piece: [M*8, columns]."""
  exact = dout.dtype == jnp.float32
  partner = [dout] if exact else [dout, dout]
  if piece.key is not None:
    partner.append(pull_terms_ref[:, piece.key])
  partner = jnp.concatenate(partner, axis=0)
  dsource = columns.select(
    piece,
    lambda head: tiles.dot(
      factors[head][:, : partner.shape[0]], partner, exact=exact
    ),
  )
  if piece.key is not None:
    key = columns.only_keys(piece, source)
    dsource -= bend * key.astype(jnp.float32)
  return dsource


def _factor(weight: jax.Array, pull: jax.Array, exact: bool) -> jax.Array:
  """Left operand of the source gradients: twice [M*8, Q] to [M*8, columns].

  Columns are the weights on the token diagonal (high terms, low terms), then
  the pulls (high, high, low). Exact factors need one term each.
  """
  rows, num_queries = weight.shape
  diagonal = num_queries * tiles.GROUP
  spread = diagonal if exact else 2 * diagonal
  columns = spread + num_queries * (1 if exact else 3)
  parts = []
  for first in range(0, columns, tiles.LANES):
    row, column = (tiles.iota((rows, tiles.LANES), axis) for axis in (0, 1))
    column += first
    part = jnp.zeros(column.shape, jnp.float32)
    if first < spread:
      query = jnp.where(column < diagonal, column, column - diagonal)
      taken = tiles.take_columns(
        weight, lambda r, i, at=query >> tiles.GROUP_BITS: at
      )
      part = jnp.where(tiles.on_diagonal(row, column), taken, 0.0)
    if first + tiles.LANES > spread:
      query = column - spread
      for _ in range(2):
        query = jnp.where(query >= num_queries, query - num_queries, query)
      taken = tiles.take_columns(pull, lambda r, i, at=query: at)
      part = jnp.where(column < spread, part, taken)
    if not exact:
      high, low = tiles.high_and_low(part)
      is_high = (column < diagonal) | (
        (column >= spread) & (column < spread + 2 * num_queries)
      )
      part = jnp.where(is_high, high, low).astype(jnp.bfloat16)
    parts.append(part)
  return jnp.concatenate(parts, axis=1)[:, :columns]


def _pull_rows(
  pulls: list[jax.Array], num_queries: int, exact: bool
) -> list[jax.Array]:
  """[M*8, J] of several groups to [terms * Q, groups * M*8] of each head."""
  turned = jnp.transpose(jnp.concatenate(pulls, axis=0))
  return [
    _in_terms(columns_lib.rows_of(turned, head, num_queries), exact)
    for head in range(turned.shape[0] // num_queries)
  ]


def _in_terms(turned: jax.Array, exact: bool) -> jax.Array:
  if exact:
    return turned
  return jnp.concatenate(tiles.high_and_low(turned), axis=0).astype(
    jnp.bfloat16
  )
