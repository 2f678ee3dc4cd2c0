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

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attnres_kernels import dispatch
from attnres_kernels.depth_attention import pallas_tpu_columns as columns_lib
from attnres_kernels.depth_attention import pallas_tpu_heads as heads_lib
from attnres_kernels.depth_attention import pallas_tpu_norm as norm_lib
from attnres_kernels.depth_attention import pallas_tpu_tiles as tiles

_MATRIX = 128  # Rows and columns of the smallest matrix unit.


def backward(
  query_QD,
  sources,
  count,
  lse_QT,
  dout_QTD,
  dlse_QT,
  accumulate=None,
  gain_D=None,
  inverse_T: Any = None,
  *,
  eps,
  heads=1,
  rank=None,
  norm_eps=None,
  interpret=False,
):
  """Returns the gradients of the queries, of every source and of the gain.

  Source gradients are added to `accumulate`, in place, if it is given. The
  gradients of the mixtures may be in arrays of their own. A gain says that the
  first mixture is normalised, by the inverse rms that the forward pass
  returned; without it, it has no gradient either.
  """
  del norm_eps  # Part of the inverse rms.
  _, flat, num_tokens = tiles.flatten(sources)
  bank = not isinstance(sources, tuple)
  num_slots = len(sources)
  num_queries, width = query_QD.shape[0], flat[0].shape[-1]
  dtype = sources[0].dtype
  accumulated = []
  if accumulate is not None:
    accumulated = [accumulate] if bank else list(accumulate)
  dsource_dtype = accumulated[0].dtype if accumulated else dtype
  written = dsource_dtype.itemsize * (2 if accumulated else 1)
  token_bytes = (num_queries + num_slots) * width * dtype.itemsize
  token_bytes += num_slots * width * written
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
  stats = [lse, dlse]
  if gain_D is not None:
    stats.append(inverse_T.reshape(1, num_tokens))
  if gain_D is None:
    stats = [tiles.stats_to_tiles(x, tile) for x in stats]
  else:
    segments = norm_lib.Segments(num_queries, num_slots)
    stats[-1] = jnp.broadcast_to(stats[-1], (segments.size, num_tokens))
    stats = [segments.pack(x, tile) for x in stats]

  def at(p, s):
    return p * steps + s

  token_spec = pl.BlockSpec((tile, width), lambda p, s, n: (at(p, s), 0))
  stats_specs = [
    pl.BlockSpec((1, *x.shape[1:]), lambda p, s, n: (at(p, s), 0, 0))
    for x in stats
  ]
  if bank:
    dsource_specs = [
      pl.BlockSpec((num_slots, tile, width), lambda p, s, n: (0, at(p, s), 0))
    ]
    dsource_shapes = [(num_slots, num_tokens, width)]
  else:
    dsource_specs = [token_spec] * num_slots
    dsource_shapes = [(num_tokens, width)] * num_slots
  if isinstance(dout_QTD, tuple):
    douts = [x.reshape(num_tokens, width).astype(dtype) for x in dout_QTD]
    dout_specs = [token_spec] * num_queries
  else:
    douts = [dout_QTD.reshape(num_queries, num_tokens, width).astype(dtype)]
    dout_specs = [
      pl.BlockSpec((num_queries, tile, width), lambda p, s, n: (0, at(p, s), 0))
    ]
  gains, gain_sums, scratch = [], [], []
  if gain_D is not None:
    gains = [gain_D[None]]
    gain_sums = [(parts, tiles.GROUP, width)]
    scratch = [pltpu.VMEM((tile, width), dtype)]
  all_sums = [sums, *gain_sums]
  fixed = terms.nbytes + pull_terms.nbytes
  fixed += sum(4 * rows * lanes for _, rows, lanes in all_sums)
  operands = [
    tiles.count_operand(count, num_slots),
    terms,
    pull_terms,
    *stats,
    *gains,
    *douts,
    *flat,
  ]
  aliases = {
    len(operands) + i: len(all_sums) + i for i in range(len(accumulated))
  }
  dquery, *rest = pl.pallas_call(
    functools.partial(
      _kernel,
      num_queries=num_queries,
      num_douts=len(douts),
      num_slots=num_slots,
      bank=bank,
      accumulate=bool(accumulated),
      num_tokens=num_tokens,
      columns=columns,
      eps=eps,
      normed=gain_D is not None,
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(parts, steps),
      in_specs=[
        tiles.whole(terms),
        tiles.whole(pull_terms),
        *stats_specs,
        *map(tiles.whole, gains),
        *dout_specs,
        *tiles.source_specs(sources, tile, width, at),
        *(dsource_specs if accumulated else []),
      ],
      out_specs=[
        *(
          pl.BlockSpec((1, *shape[1:]), lambda p, s, n: (p, 0, 0))
          for shape in all_sums
        ),
        *dsource_specs,
      ],
      scratch_shapes=scratch,
    ),
    out_shape=[
      *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in all_sums),
      *(jax.ShapeDtypeStruct(shape, dsource_dtype) for shape in dsource_shapes),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary"),
      vmem_limit_bytes=dispatch.tpu_vmem_limit(tile * token_bytes + fixed),
    ),
    cost_estimate=tiles.cost(
      10, num_queries, num_slots, num_tokens, width, token_bytes
    ),
    input_output_aliases=aliases,
    interpret=interpret,
    name="depth_attention_backward",
  )(
    *operands,
    *(a.reshape(shape) for a, shape in zip(accumulated, dsource_shapes)),
  )
  dquery = dquery.reshape(-1, num_queries, sums[-1]).sum(axis=0)
  dquery = columns.together(dquery)
  dgains, dsources = rest[: len(gains)], rest[len(gains) :]
  if bank:
    dsources = dsources[0].reshape(sources.shape)
  else:
    dsources = tuple(d.reshape(sources[0].shape) for d in dsources)
  return dquery, dsources, *(dgain.sum(axis=(0, 1)) for dgain in dgains)


def _kernel(
  count_ref,
  terms_ref,
  pull_terms_ref,
  lse_ref,
  dlse_ref,
  *refs,
  num_queries,
  num_douts,
  num_slots,
  bank,
  accumulate,
  num_tokens,
  columns,
  eps,
  normed,
):
  inverse_ref: Any = None
  gain_ref: Any = None
  scaled_ref: Any = None
  dgain_ref: Any = None
  if normed:
    inverse_ref, gain_ref, *refs, scaled_ref = refs
  dout_refs, refs = refs[:num_douts], refs[num_douts:]
  source_refs, refs = refs[:num_slots], refs[num_slots:]
  dsources = 1 if bank else num_slots
  old_refs, (dquery_ref, *dsource_refs) = (
    (refs[:dsources], refs[dsources:]) if accumulate else (None, refs)
  )
  if normed:
    dgain_ref, *dsource_refs = dsource_refs
  apart = len(dout_refs[0].shape) == 2
  tile = dout_refs[0].shape[-2]
  exact = dout_refs[0].dtype == jnp.float32
  count = count_ref[0] if bank else None
  step = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
  softmaxes = num_queries * columns.heads

  @pl.when(pl.program_id(1) == 0)
  def _():
    dquery_ref[...] = jnp.zeros_like(dquery_ref)
    if dgain_ref is not None:
      dgain_ref[...] = jnp.zeros_like(dgain_ref)

  def load_dout(query, rows, chunk):
    if apart:
      return dout_refs[query][rows, chunk]
    return dout_refs[0][query, rows, chunk]

  def load_douts(rows, kept, chunk):
    douts = [load_dout(q, rows, chunk) for q in range(normed, num_queries)]
    if scaled_ref is not None:
      douts.insert(0, scaled_ref[rows, chunk])
    return tiles.concatenate(douts, kept)

  factors_of = None
  if columns.heads > 1:
    rows = num_slots * tiles.GROUP
    factors_of = heads_lib.Factors(rows, num_queries, columns.heads, exact)

  if scaled_ref is not None:
    for first in range(0, tile, tiles.ROWS):
      rows = slice(first, first + tiles.ROWS)
      for piece in columns.pieces:
        wide = load_dout(0, rows, piece.columns).astype(jnp.float32)
        wide *= gain_ref[:, piece.columns]
        scaled_ref[rows, piece.columns] = wide.astype(scaled_ref.dtype)

  def open_group(first):
    rows = slice(first, first + tiles.GROUP)
    base = step * tile + first
    kept = tiles.kept_rows(num_tokens, tile, base, tiles.GROUP)
    load = functools.partial(tiles.load_sources, source_refs, rows, kept, bank)
    return rows, kept, load, functools.partial(load_douts, rows, kept)

  def inverse_rms(kept, load):
    inverse = tiles.inverse_rms(load, columns, eps)
    if kept is None:
      return inverse
    # Without an eps, it is infinite in rows of padding, which are zero.
    return jnp.where(jnp.concatenate([kept] * num_slots), inverse, 0.0)

  groups: list[Any] = []
  lse: Any = None
  dlse: Any = None
  opened = list(map(open_group, range(0, tile, tiles.GROUP)))
  if normed:
    segments = norm_lib.Segments(num_queries, num_slots)
    for first in range(0, len(opened), segments.groups):
      several = opened[first : first + segments.groups]
      lanes = slice(first * segments.size, first * segments.size + tiles.LANES)
      inverses = None
      if not columns.all_keys:
        inverses = [inverse_rms(kept, load) for _, kept, load, _ in several]
      statistics = norm_lib.Statistics(
        segments,
        [
          _product_rows(
            load, norm_lib.with_sources(douts, load),
            (num_queries + num_slots) * tiles.GROUP, terms_ref, columns,
            num_slots * tiles.GROUP, exact,
          )
          for _, _, load, douts in several
        ],
        terms_ref.shape[0] // num_queries, lse_ref[0, :, lanes],
        dlse_ref[0, :, lanes], inverse_ref[0, :, lanes], inverses, columns, eps,
        exact,
      )  # fmt: skip
      for i, group in enumerate(several):
        bend = None
        if not columns.all_keys:
          bend = statistics.of_group(statistics.bend, i, 1)
        pull = statistics.of_group(statistics.pull, i, num_queries)
        groups.append((*group, True, bend, [statistics.factor(i)], pull))
  else:
    lse, dlse = jnp.transpose(lse_ref[0]), jnp.transpose(dlse_ref[0])
  for rows, kept, load, douts in opened[len(groups) :]:
    inverse = inverse_rms(kept, load)
    products_of = _products if columns.heads == 1 else heads_lib.products
    product, score = products_of(
      load, douts, terms_ref, columns, num_slots, num_queries, exact
    )
    product = tiles.on_slots(product)
    score = tiles.on_slots(score * inverse)
    valid = tiles.valid_slots(score.shape, count)
    # Only for valid slots; the lse of an empty set is -inf.
    score = tiles.where(valid, score, 0.0)
    product = tiles.where(valid, product, 0.0)
    weight = _weights(score, lse[rows], valid)
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
    groups.append((rows, kept, load, douts, False, bend, factors, pull))

  # A second sweep, so that the statistics of all groups can overlap.
  for rows, kept, load, douts, norm, bend, factors, _ in groups:
    for piece in columns.pieces:
      chunk = piece.columns
      dsource = _dsource(
        load(chunk), douts(chunk), pull_terms_ref, norm, bend, factors, columns,
        piece,
      )  # fmt: skip
      if normed:
        # Behind the gradients are the rows of the normalised mixture.
        dnormed = tiles.concatenate([load_dout(0, rows, chunk)], kept)
        normed_rows = dsource[-tiles.GROUP :]
        dgain_ref[0, :, chunk] += dnormed.astype(jnp.float32) * normed_rows
      if count is not None:
        valid = tiles.iota(dsource.shape, 0) < count * tiles.GROUP
        dsource = jnp.where(valid, dsource, 0.0)
      for i in range(num_slots):
        part = dsource[i * tiles.GROUP : (i + 1) * tiles.GROUP]
        at = (0, (i, rows, chunk)) if bank else (i, (rows, chunk))
        if old_refs is not None:
          part += old_refs[at[0]][at[1]].astype(jnp.float32)
        dsource_ref = dsource_refs[at[0]]
        dsource_ref[at[1]] = part.astype(dsource_ref.dtype)

  # The query gradient also sums over tokens: take as many groups at once as
  # fill the depth of a matrix unit.
  span = max(1, 2 * _MATRIX // (num_slots * tiles.GROUP))
  for first in range(0, len(groups), span):
    several = groups[first : first + span]
    pulls = [pull for *_, pull in several]
    pulls = _pull_rows(pulls, num_queries, exact)
    for piece in columns.pieces if columns.heads > 1 else columns.keys:
      sources = [load(piece.columns) for _, _, load, *_ in several]
      sources = jnp.concatenate(sources, axis=0)
      dquery = columns.select(
        piece,
        lambda h, pulls=pulls, x=sources: tiles.dot(pulls[h], x, exact=exact),
      )
      if count is not None:
        # An empty bank may hold anything, and 0 * NaN is NaN.
        dquery = jnp.where(count > 0, dquery, 0.0)
      dquery_ref[0, :, piece.key] += dquery


def _weights(score, lse, valid=None):
  """Weights of the sources of each token: [M, 8, Q]."""
  shifted = tiles.where(valid, score - lse[None], 0.0)
  weight = tiles.where(valid, jnp.exp(shifted), 0.0)
  # Large scores differ from those of the forward pass, which sums in another
  # order: normalise again, so that the weights still sum to one.
  total = jnp.sum(weight, axis=0)
  return weight / jnp.where(total == 0.0, 1.0, total)[None]


def _products(load, douts, terms_ref, columns, num_slots, num_queries, exact):
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
  load, partners, diagonal, terms_ref, columns, source_rows, exact
):
  """Products of source rows with as many partners, and then query terms."""
  partner_rows = diagonal + terms_ref.shape[0]
  # Rows of the left operand stream; those of the right operand are tiled.
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
  source, dout, pull_terms_ref, normed, bend, factors, columns, piece
):
  """Gradients of the sources in the columns of a piece: [M*8, columns].

  With a norm, then the normalised mixture: [M*8 + 8, columns].
  """
  exact = dout.dtype == jnp.float32
  partner = [dout] if exact else [dout, dout]
  if normed:
    partner += [source] if exact else [source, source]
  if piece.key is not None:
    partner.append(pull_terms_ref[:, piece.key])
  partner = jnp.concatenate(partner, axis=0)
  dsource = columns.select(
    piece,
    lambda head: tiles.dot(
      factors[head][:, : partner.shape[0]], partner, exact=exact
    ),
  )
  if bend is not None and piece.key is not None:
    key = columns.only_keys(piece, source)
    bent = bend * key.astype(jnp.float32)
    dsource = (
      jnp.concatenate(
        [dsource[: len(bent)] - bent, dsource[len(bent) :]], axis=0
      )
      if normed
      else dsource - bent
    )
  return dsource


def _factor(weight, pull, exact):
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


def _pull_rows(pulls, num_queries, exact):
  """[M*8, J] of several groups to [terms * Q, groups * M*8] of each head."""
  turned = jnp.transpose(jnp.concatenate(pulls, axis=0))
  return [
    _in_terms(columns_lib.rows_of(turned, head, num_queries), exact)
    for head in range(turned.shape[0] // num_queries)
  ]


def _in_terms(turned, exact):
  if exact:
    return turned
  return jnp.concatenate(tiles.high_and_low(turned), axis=0).astype(
    jnp.bfloat16
  )
