# SPDX-License-Identifier: Apache-2.0
"""Depth attention on TPU, backward: one read of sources and output gradients.

Per group of tokens (see `pallas_tpu_tiles`) and head, with `v` of rows (source,
token) and `dout` of rows (query, token):

  products   v x dout^T on the token diagonal, v x query^T for the scores
  dsources   weights x dout + pulls x query - bend * v, the first two as one
             product
  dquery     pulls^T x v

Scores are recomputed from sources and log-normalisers.
"""

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attnres_kernels import pallas_tpu_rows as tpu_rows
from attnres_kernels.depth_attention import pallas_tpu_tiles as tiles


def backward(
  query_QD: jax.Array, sources: tuple[jax.Array, ...], lse_QT: jax.Array,
  douts: tuple[jax.Array, ...], dlse_QT: jax.Array, *, eps: float,
  heads: int = 1, rank: int | None = None, interpret: Any = False,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:  # fmt: skip
  """Returns the gradients of the queries and of every source.

  `douts` are the gradients of the mixtures, a tuple of Q arrays.
  """
  num_queries, num_slots, first = len(query_QD), len(sources), sources[0]
  slabs = *[first] * num_queries, *sources, *sources
  call = tiles.call_of(slabs, first.shape[-1], heads)
  columns = tiles.Columns(call.width, heads, rank)
  terms = columns.query_terms(query_QD, first.dtype)
  pull_terms = tiles.pull_terms(terms, num_queries)
  # High and low terms of the pulls are summed separately.
  exact = first.dtype == jnp.float32
  sums = call.parts, (1 if exact else 2) * num_queries, call.width
  wide = [*(x.astype(first.dtype) for x in douts), *sources]
  fixed = terms.nbytes + pull_terms.nbytes + 4 * sums[1] * sums[2]
  dquery, *dsources = pl.pallas_call(
    functools.partial(
      _kernel,
      num_queries=num_queries,
      num_tokens=call.tokens,
      columns=columns,
      eps=eps,
    ),
    grid=(call.parts, call.tiles // call.parts),
    in_specs=[
      tpu_rows.constant_spec(terms.shape),
      tpu_rows.constant_spec(pull_terms.shape),
      *[call.stats_spec(heads * num_queries)] * 2,
      *[call.wide_spec()] * len(wide),
    ],
    out_specs=[tpu_rows.sums_spec(sums), *[call.wide_spec()] * num_slots],
    out_shape=[
      jax.ShapeDtypeStruct(sums, jnp.float32), *map(call.like, sources)
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary"),
      vmem_limit_bytes=call.vmem_limit(fixed),
    ),
    cost_estimate=tiles.cost(call, 10, num_queries, num_slots),
    interpret=interpret,
    name="depth_attention_backward",
  )(
    terms, pull_terms, *(call.stats(x, heads) for x in (lse_QT, dlse_QT)),
    *map(call.flat, wide),
  )  # fmt: skip
  dquery = dquery.reshape(-1, num_queries, call.width).sum(axis=0)
  # Columns in front of the key are no part of the query.
  dquery = dquery[:, call.width - query_QD.shape[1] :]
  return dquery, tuple(d.reshape(first.shape) for d in dsources)


def _kernel(
  terms_ref: Any, pull_terms_ref: Any, lse_ref: Any, dlse_ref: Any, *refs: Any,
  num_queries: int, num_tokens: int, columns: tiles.Columns, eps: float,
) -> None:  # fmt: skip
  """Terms of queries and pulls, lse and dlse [1, J, tile], then rows [tile, D].

  These are Q output gradients and M sources. Then the results: the query
  gradient [1, terms * Q, D], summed over steps, and M source gradients.
  """
  dout_refs, refs = refs[:num_queries], refs[num_queries:]
  num_slots = len(refs) // 2
  source_refs, (dquery_ref, *dsource_refs) = refs[:num_slots], refs[num_slots:]
  tile = dout_refs[0].shape[0]
  exact = dout_refs[0].dtype == jnp.float32
  step = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)

  # The steps of a part run in order and add to the same block, which holds
  # anything before the first of them.
  @pl.when(pl.program_id(1) == 0)
  def _():
    dquery_ref[...] = jnp.zeros_like(dquery_ref)

  groups: list[Any] = []
  lse, dlse = jnp.transpose(lse_ref[0]), jnp.transpose(dlse_ref[0])
  for first in range(0, tile, tiles.GROUP):
    rows = slice(first, first + tiles.GROUP)
    valid = tpu_rows.valid_rows(
      num_tokens, tile, step * tile + first, tiles.GROUP
    )
    load = functools.partial(tiles.load_sources, source_refs, rows, valid)
    douts = functools.partial(tiles.load_sources, dout_refs, rows, valid)
    inverse = columns.inverse_rms(load, eps)
    if valid is not None:
      # Without an eps, it is infinite in rows of padding, which are zero.
      inverse = jnp.where(jnp.concatenate([valid] * num_slots), inverse, 0.0)
    product, score = _products(
      load, douts, terms_ref, columns, num_queries, exact
    )
    product = tiles.on_slots(product)
    score = tiles.on_slots(score * inverse)
    weight = _weights(score, lse[rows])
    mean = jnp.sum(weight * product, axis=0)
    dscore = weight * (product + (dlse[rows] - mean)[None])
    flat = lambda x: x.reshape(-1, x.shape[-1])
    # Through the norm, a row also changes along itself.
    bend = jnp.sum(flat(dscore * score), axis=1, keepdims=True)
    bend *= inverse * inverse * (1.0 / columns.key_width)
    weight, pull = flat(weight), flat(dscore) * inverse
    cuts = [
      slice(h * num_queries, (h + 1) * num_queries)
      for h in range(columns.heads)
    ]
    pulls = [pull[:, at] for at in cuts]
    factors = [_factor(weight[:, at], x, exact) for at, x in zip(cuts, pulls)]
    groups.append((rows, load, douts, bend, factors, pulls))

  # A second sweep, so that the statistics of all groups can overlap.
  for rows, load, douts, bend, factors, _ in groups:
    for piece in columns.pieces:
      source, dout = load(piece), douts(piece)
      partner = [dout] if exact else [dout, dout]
      partner = jnp.concatenate([*partner, pull_terms_ref[:, piece]], axis=0)
      dsource = columns.select(
        piece,
        lambda head, f=factors, x=partner: tiles.dot(f[head], x, exact=exact),
      )
      dsource -= bend * columns.keys(piece, source).astype(jnp.float32)
      for i, dsource_ref in enumerate(dsource_refs):
        part = dsource[i * tiles.GROUP : (i + 1) * tiles.GROUP]
        dsource_ref[rows, piece] = part.astype(dsource_ref.dtype)

  # The query gradient also sums over tokens: take as many groups at once as
  # fill the depth of a matrix unit.
  span = max(1, 2 * tpu_rows.LANES // (num_slots * tiles.GROUP))
  for first in range(0, len(groups), span):
    several = groups[first : first + span]
    by_head = zip(*(pulls for *_, pulls in several))
    pulls = [_in_terms(jnp.concatenate(x, axis=0), exact) for x in by_head]
    for piece in columns.pieces:
      sources = [load(piece) for _, load, *_ in several]
      sources = jnp.concatenate(sources, axis=0)
      dquery_ref[0, :, piece] += columns.select(
        piece,
        lambda head, p=pulls, x=sources: tiles.dot(p[head], x, exact=exact),
      )


def _weights(score: jax.Array, lse: jax.Array) -> jax.Array:
  """Weights of the sources of each token: [M, 8, Q]."""
  weight = jnp.exp(score - lse[None])
  # Large scores differ from the forward pass's, which sums in another
  # order: normalise again, so that the weights still sum to one.
  return weight / jnp.sum(weight, axis=0)[None]


def _products(
  load: tpu_rows.Load, douts: tpu_rows.Load, terms_ref: Any,
  columns: tiles.Columns, num_queries: int, exact: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
  """Products of source rows with their token's dout and the query: [M*8, J]."""
  diagonal = num_queries * tiles.GROUP
  products, scores = [], []
  for head in range(columns.heads):

    def multiply(piece: slice, head: int = head) -> jax.Array:
      partner = jnp.concatenate([douts(piece), terms_ref[:, piece]], axis=0)
      partner = columns.owned(piece, head, partner)
      return tiles.dot(partner, load(piece), 1, exact=exact)

    product = tiles.total(map(multiply, columns.of(head)))
    scores.append(tiles.sum_terms(product[diagonal:], num_queries))
    product = product[:diagonal].reshape(num_queries, tiles.GROUP, -1)
    # Off the diagonal are products with the gradients of other tokens.
    row, column = (tiles.iota((1, *product.shape[1:]), i) for i in (1, 2))
    product = jnp.where(tiles.on_diagonal(row, column), product, 0.0)
    products.append(jnp.sum(product, axis=1))
  turned = lambda x: jnp.transpose(jnp.concatenate(x, axis=0))
  return turned(products), turned(scores)


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
  for first in range(0, columns, tpu_rows.LANES):
    row, column = (tiles.iota((rows, tpu_rows.LANES), axis) for axis in (0, 1))
    column += first
    part = jnp.zeros(column.shape, jnp.float32)
    if first < spread:
      query = jnp.where(column < diagonal, column, column - diagonal)
      taken = tiles.take_columns(weight, query >> tiles.GROUP_BITS)
      part = jnp.where(tiles.on_diagonal(row, column), taken, 0.0)
    if first + tpu_rows.LANES > spread:
      # The column modulo Q, of up to three copies, without a division.
      query = column - spread
      for _ in range(2):
        query = jnp.where(query >= num_queries, query - num_queries, query)
      taken = tiles.take_columns(pull, query)
      part = jnp.where(column < spread, part, taken)
    if not exact:
      high, low = tiles.high_and_low(part)
      is_high = (column < diagonal) | (
        (column >= spread) & (column < spread + 2 * num_queries)
      )
      part = jnp.where(is_high, high, low).astype(jnp.bfloat16)
    parts.append(part)
  return jnp.concatenate(parts, axis=1)[:, :columns]


def _in_terms(pull: jax.Array, exact: bool) -> jax.Array:
  """[rows, Q] to [terms * Q, rows]."""
  turned = jnp.transpose(pull)
  if exact:
    return turned
  terms = jnp.concatenate(tiles.high_and_low(turned), axis=0)
  return terms.astype(jnp.bfloat16)
