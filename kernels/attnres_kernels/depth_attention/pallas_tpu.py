# SPDX-License-Identifier: Apache-2.0
"""Depth attention on TPU: one read of the sources, weighted sums on the MXU.

Tokens are taken in groups of 16, the row tile of bfloat16. Per group, the M
sources form one matrix `v` [M*16, D] whose rows are (source, token), and all
statistics live in matrices [M*16, Q*16] with columns (query, token), of which
only the token diagonal counts. In that layout

  scores        v x query^T, spread over the columns by a 0/1 matrix
  softmax       maximum and sum over rows
  mixtures      weights^T x v
  products      v x dout^T              (backward)
  dsources      weights x dout + pulls x query - bend * v
  dquery        pulls^T x v

so that everything wide is a matrix product. Bfloat16 sources are exact on the
MXU; the float32 factors beside them (query, weights, pulls) are split into
bfloat16 terms, which keeps the error near that of the final rounding. Float32
sources use float32 products throughout.
"""

import dataclasses
import functools
import operator

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

_GROUP_BITS = 4
_GROUP = 1 << _GROUP_BITS  # Tokens per diagonal product: the bfloat16 row tile.
_QUERIES = 6  # Queries per diagonal product, at most: 6 * 16 + 6 * 3 columns.
_MASKED = -1e30  # A score below any real one, yet finite.
_VMEM_BYTES = 56 * 2**20  # Of 64 MiB on v5p and tpu7x, 128 on the others.


@dataclasses.dataclass(frozen=True)
class BlockSizes:
  """Tokens per grid step and lanes per inner product step."""

  tokens: int
  lanes: int = 1280

  @classmethod
  def choose(cls, num_tokens, slabs, width, itemsize):
    """The largest tile up to 128 tokens whose two buffers stay small.

    Args:
      num_tokens: all tokens of the call.
      slabs: rows of `width` moved per token.
      width: D.
      itemsize: bytes per element.
    """
    # Narrow rows want more of them, to fill the schedule.
    tokens = 128 if width <= 1536 else 64
    while tokens > _GROUP and (
      2 * slabs * tokens * width * itemsize > 24 * 2**20
      or tokens // 2 >= num_tokens
    ):
      tokens //= 2
    return cls(tokens)


def why_not(function, query_QD, sources, *args, eps):
  """The reason why these arguments cannot run, or None."""
  del args, eps
  num_slots, first = len(sources), sources[0]
  width = first.shape[-1]
  if first.dtype not in (jnp.bfloat16, jnp.float32):
    return f"sources must be bfloat16 or float32, got {first.dtype}"
  if query_QD.dtype != jnp.float32:
    return f"queries must be float32, got {query_QD.dtype}"
  slabs = num_slots + query_QD.shape[0]
  slabs += num_slots if function == "backward" else 0
  tile = 2 * slabs * _GROUP * width * first.dtype.itemsize
  if tile > _VMEM_BYTES:
    return (
      f"query {query_QD.shape} with {num_slots} sources {first.shape} needs"
      f" {tile >> 20} MiB of VMEM for two buffers of {_GROUP} tokens"
    )
  return None


def forward(query_QD, sources, count, *, eps, interpret=False, blocks=None):
  """Returns the mixtures and their log-normalisers."""
  tokens_shape, flat, num_tokens = _flatten(sources)
  num_slots = len(sources)
  num_queries, width = query_QD.shape
  dtype = sources[0].dtype
  blocks = blocks or BlockSizes.choose(
    num_tokens, num_slots + num_queries, width, dtype.itemsize
  )
  tile = blocks.tokens
  steps = pl.cdiv(num_tokens, tile)
  terms = _query_terms(query_QD, dtype)
  stats = _stats_shape(num_queries, tile)
  out, stats = pl.pallas_call(
    functools.partial(
      _forward_kernel,
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
        _whole(terms),
        *_source_specs(sources, tile, width, lambda t: t),
      ],
      out_specs=[
        pl.BlockSpec((num_queries, tile, width), lambda t, n: (0, t, 0)),
        pl.BlockSpec((1, *stats), lambda t, n: (t, 0, 0, 0)),
      ],
    ),
    out_shape=[
      jax.ShapeDtypeStruct((num_queries, num_tokens, width), dtype),
      jax.ShapeDtypeStruct((steps, *stats), jnp.float32),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel",), vmem_limit_bytes=_VMEM_BYTES
    ),
    cost_estimate=cost(
      "forward", num_queries, num_slots, num_tokens, width, dtype.itemsize
    ),
    interpret=interpret,
    name="depth_attention_forward",
  )(_count(count, num_slots), terms, *flat)
  lse_QT = _from_groups(stats, num_queries, num_tokens)
  return (
    out.reshape((num_queries,) + tokens_shape + (width,)),
    lse_QT.reshape((num_queries,) + tokens_shape),
  )


def backward(
  query_QD,
  sources,
  count,
  lse_QT,
  dout_QTD,
  dlse_QT,
  *,
  eps,
  interpret=False,
  blocks=None,
):
  """Returns the gradients of the queries and of every source."""
  _, flat, num_tokens = _flatten(sources)
  bank = not isinstance(sources, tuple)
  num_slots = len(sources)
  num_queries, width = query_QD.shape
  dtype = sources[0].dtype
  blocks = blocks or BlockSizes.choose(
    num_tokens, 2 * num_slots + num_queries, width, dtype.itemsize
  )
  tile = blocks.tokens
  tiles = pl.cdiv(num_tokens, tile)
  # Every part of the outer axis sums its own query gradient, in order.
  parts = max(p for p in range(1, 9) if tiles % p == 0)
  steps = tiles // parts
  terms = _query_terms(query_QD, dtype)
  lse, dlse = (
    _to_groups(x.reshape(num_queries, num_tokens), tile)
    for x in (lse_QT, dlse_QT.astype(jnp.float32))
  )

  def at(p, s):
    return p * steps + s

  stats_spec = pl.BlockSpec(
    (1, *lse.shape[1:]), lambda p, s, n: (at(p, s), 0, 0, 0)
  )
  if bank:
    dsource_specs = [
      pl.BlockSpec((num_slots, tile, width), lambda p, s, n: (0, at(p, s), 0))
    ]
    dsource_shapes = [(num_slots, num_tokens, width)]
  else:
    dsource_specs = [
      pl.BlockSpec((tile, width), lambda p, s, n: (at(p, s), 0))
    ] * num_slots
    dsource_shapes = [(num_tokens, width)] * num_slots
  dquery, *dsources = pl.pallas_call(
    functools.partial(
      _backward_kernel,
      num_slots=num_slots,
      bank=bank,
      num_tokens=num_tokens,
      lanes=blocks.lanes,
      eps=eps,
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(parts, steps),
      in_specs=[
        _whole(terms),
        stats_spec,
        stats_spec,
        pl.BlockSpec(
          (num_queries, tile, width), lambda p, s, n: (0, at(p, s), 0)
        ),
        *_source_specs(sources, tile, width, at),
      ],
      out_specs=[
        pl.BlockSpec((1, *terms.shape), lambda p, s, n: (p, 0, 0, 0)),
        *dsource_specs,
      ],
    ),
    out_shape=[
      jax.ShapeDtypeStruct((parts, *terms.shape), jnp.float32),
      *(jax.ShapeDtypeStruct(shape, dtype) for shape in dsource_shapes),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary"),
      vmem_limit_bytes=_VMEM_BYTES,
    ),
    cost_estimate=cost(
      "backward", num_queries, num_slots, num_tokens, width, dtype.itemsize
    ),
    interpret=interpret,
    name="depth_attention_backward",
  )(
    _count(count, num_slots),
    terms,
    lse,
    dlse,
    dout_QTD.reshape(num_queries, num_tokens, width).astype(dtype),
    *flat,
  )
  # Rows are (term, query): the pulls' high terms, then their low ones.
  chunk = _query_chunk(num_queries)
  dquery = dquery.sum(axis=0).reshape(terms.shape[0], -1, chunk, width)
  dquery = dquery[:, :2].sum(axis=1).reshape(-1, width)[:num_queries]
  if bank:
    return dquery, dsources[0].reshape(sources.shape)
  return dquery, tuple(d.reshape(sources[0].shape) for d in dsources)


def cost(function, num_queries, num_slots, num_tokens, width, itemsize):
  """What the kernel must move and compute, for the compiler's schedule."""
  slabs = num_queries + num_slots
  flops = 4 * num_queries * num_slots + 2 * num_slots
  if function == "backward":
    slabs += num_slots
    flops = 10 * num_queries * num_slots + 4 * num_slots
  stats = num_queries * num_tokens * (4 if function == "forward" else 8)
  return pl.CostEstimate(
    flops=flops * num_tokens * width,
    bytes_accessed=slabs * num_tokens * width * itemsize + stats,
    transcendentals=num_queries * num_slots * num_tokens,
  )


def _forward_kernel(
  count_ref, terms_ref, *refs, num_slots, bank, num_tokens, lanes, eps
):
  source_refs, (out_ref, lse_ref) = refs[:num_slots], refs[num_slots:]
  num_queries, tile, width = out_ref.shape
  exact = out_ref.dtype == jnp.float32
  count = count_ref[0] if bank else None
  base = pl.program_id(0) * tile
  chunks = _chunks(width, lanes)
  spans = _spans(num_queries)
  stride = _query_chunk(num_queries)
  # The two terms of the weights side by side where the matrix unit's depth of
  # 128 has room for them, one below the other where it has not.
  stack = 1 if 0 < (num_slots * _GROUP) % 128 <= 64 else 0
  weights = []
  for group in range(tile // _GROUP):
    rows = slice(group * _GROUP, (group + 1) * _GROUP)
    kept = _kept_rows(num_tokens, tile, base, group)
    load = functools.partial(_load_sources, source_refs, rows, kept, bank)
    inverse = _inverse_rms(load, chunks, width, eps)
    for number, (first, last) in enumerate(spans):
      size = last - first
      raw = _total(
        _dot(terms_ref[number, :, chunk], load(chunk), 1, exact=exact)
        for chunk in chunks
      )
      spread = _spread(raw.shape[0], 0, size, stride, size * _GROUP, exact)
      mask = _mask(num_slots, size, size * _GROUP, count)
      score = _select_dot(jnp.transpose(raw), spread, 3) * inverse
      score = jnp.where(mask, score, _MASKED)
      top = jnp.max(score, axis=0, keepdims=True)
      weight = jnp.where(mask, jnp.exp(score - top), 0.0)
      total = jnp.sum(weight, axis=0, keepdims=True)
      empty = total == 0.0
      safe = jnp.where(empty, 1.0, total)
      lse_ref[0, number, group : group + 1, : size * _GROUP] = jnp.where(
        empty, -jnp.inf, top + jnp.log(safe)
      )
      weight = jnp.transpose(weight / safe)
      if not exact:
        weight = jnp.concatenate(_split(weight, 2), axis=stack)
      weights.append((rows, load, first, last, weight))

  # A second sweep, so that the statistics of all groups can overlap.
  for rows, load, first, last, weight in weights:
    half = (last - first) * _GROUP
    for chunk in chunks:
      source = load(chunk)
      if not exact and stack:
        source = jnp.concatenate([source, source], axis=0)
      mixed = _dot(weight, source, exact=exact)
      if not exact and not stack:
        mixed = mixed[:half] + mixed[half:]
      if count is not None:
        # An empty bank may hold anything, and 0 * NaN is NaN.
        mixed = jnp.where(count > 0, mixed, 0.0)
      mixed = mixed.astype(out_ref.dtype)
      out_ref[first:last, rows, chunk] = mixed.reshape(
        last - first, _GROUP, mixed.shape[-1]
      )


def _backward_kernel(
  count_ref,
  terms_ref,
  lse_ref,
  dlse_ref,
  dout_ref,
  *refs,
  num_slots,
  bank,
  num_tokens,
  lanes,
  eps,
):
  source_refs = refs[:num_slots]
  dquery_ref, *dsource_refs = refs[num_slots:]
  num_queries, tile, width = dout_ref.shape
  exact = dout_ref.dtype == jnp.float32
  count = count_ref[0] if bank else None
  step = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
  chunks = _chunks(width, lanes)
  stride = _query_chunk(num_queries)

  @pl.when(pl.program_id(1) == 0)
  def _():
    dquery_ref[...] = jnp.zeros_like(dquery_ref)

  def load_partners(number, first, last, rows, kept, chunk):
    # Output gradients by (query, token), then the query terms: the right side
    # of the products with the sources and of those that make their gradients.
    parts = [dout_ref[q, rows, chunk] for q in range(first, last)]
    if kept is not None:
      parts = [jnp.where(kept, part, jnp.zeros_like(part)) for part in parts]
    return jnp.concatenate([*parts, terms_ref[number, :, chunk]], axis=0)

  groups = []
  for group in range(tile // _GROUP):
    rows = slice(group * _GROUP, (group + 1) * _GROUP)
    kept = _kept_rows(num_tokens, tile, step * tile, group)
    load = functools.partial(_load_sources, source_refs, rows, kept, bank)
    inverse = _inverse_rms(load, chunks, width, eps)
    factors, pulls, partners, bend = [], [], [], 0.0
    for number, (first, last) in enumerate(_spans(num_queries)):
      partner = functools.partial(
        load_partners, number, first, last, rows, kept
      )
      product = _total(
        _dot(load(chunk), partner(chunk), 1, exact=exact) for chunk in chunks
      )
      diagonal = (last - first) * _GROUP
      columns = product.shape[1]
      mask = _mask(num_slots, last - first, columns, count)
      spread = _spread(columns, diagonal, last - first, stride, columns, exact)
      lse, dlse = (
        _pad_lanes(ref[0, number, group : group + 1, :diagonal], columns)
        for ref in (lse_ref, dlse_ref)
      )
      score = _select_dot(product, spread, 3) * inverse
      # Only rows that a mask lets through; an empty set's lse is -inf.
      weight = jnp.where(mask, jnp.exp(jnp.where(mask, score - lse, 0.0)), 0.0)
      # Large scores differ from the forward pass's by the order of a sum:
      # what the sources share must still be one.
      total = jnp.sum(weight, axis=0, keepdims=True)
      weight = weight / jnp.where(total == 0.0, 1.0, total)
      product = jnp.where(mask, product, 0.0)
      mean = jnp.sum(weight * product, axis=0, keepdims=True)
      dscore = weight * (product + (dlse - mean))
      bend += jnp.sum(
        jnp.where(mask, dscore * score, 0.0), axis=1, keepdims=True
      )
      pull = _select_dot(dscore * inverse, spread, 2, 1)
      factors.append(_terms(jnp.where(mask, weight, pull), exact))
      pulls.append(_pull_rows(pull, diagonal, stride, exact))
      partners.append(partner)
    bend = bend * inverse * inverse * (1.0 / width)
    groups.append((rows, load, bend, factors, pulls, partners))

  # A second sweep, so that the statistics of all groups can overlap.
  for rows, load, bend, factors, pulls, partners in groups:
    for chunk in chunks:
      source = load(chunk)
      dsource = -bend * source.astype(jnp.float32)
      for number, (factor, pull, partner) in enumerate(
        zip(factors, pulls, partners)
      ):
        dquery = _dot(pull, source, exact=exact)
        if count is not None:
          # An empty bank may hold anything, and 0 * NaN is NaN.
          dquery = jnp.where(count > 0, dquery, 0.0)
        dquery_ref[0, number, :, chunk] += dquery
        right = partner(chunk)
        for term in factor:
          dsource += _dot(term, right, exact=exact)
      if count is not None:
        valid = _iota(dsource.shape, 0) < count * _GROUP
        dsource = jnp.where(valid, dsource, 0.0)
      dsource = dsource.astype(source.dtype)
      for i in range(num_slots):
        part = dsource[i * _GROUP : (i + 1) * _GROUP]
        if bank:
          dsource_refs[0][i, rows, chunk] = part
        else:
          dsource_refs[i][rows, chunk] = part


def _inverse_rms(load, chunks, width, eps):
  """Of every source row of a group: [M*16, 1]."""
  square = 0.0
  for chunk in chunks:
    wide = load(chunk).astype(jnp.float32)
    square += jnp.sum(wide * wide, axis=1, keepdims=True)
  return jax.lax.rsqrt(square * (1.0 / width) + eps)


def _load_sources(source_refs, rows, kept, bank, chunk):
  parts = [
    ref[0, rows, chunk] if bank else ref[rows, chunk] for ref in source_refs
  ]
  if kept is not None:
    parts = [jnp.where(kept, part, jnp.zeros_like(part)) for part in parts]
  return jnp.concatenate(parts, axis=0)


def _kept_rows(num_tokens, tile, base, group):
  """Which rows of a group are tokens; None when all are, as usual."""
  if num_tokens % tile == 0:
    return None
  return _iota((_GROUP, 1), 0) < num_tokens - base - group * _GROUP


def _total(terms):
  return functools.reduce(operator.add, terms)


def _mask(num_slots, num_queries, columns, count):
  """The token diagonal of [M*16, columns], without slots that do not count."""
  shape = (num_slots * _GROUP, columns)
  row, column = _iota(shape, 0), _iota(shape, 1)
  mask = (row & (_GROUP - 1)) == (column & (_GROUP - 1))
  if columns > num_queries * _GROUP:
    mask &= column < num_queries * _GROUP
  return mask if count is None else mask & (row < count * _GROUP)


def _spread(rows, first, num_queries, stride, columns, exact):
  """0/1 matrix from query terms to (query, token) columns.

  Rows from `first` on are (term, query), `stride` rows per term; every term of
  a query goes to its 16 columns.
  """
  diagonal = num_queries * _GROUP
  shape = (rows, columns)
  row, column = _iota(shape, 0), _iota(shape, 1)
  query = (column >> _GROUP_BITS) + first
  hit = row == query
  for term in range(1, (rows - first) // stride):
    hit |= row == query + term * stride
  if shape[1] > diagonal:
    hit &= column < diagonal
  return hit.astype(jnp.float32 if exact else jnp.bfloat16)


def _pull_rows(pull, first, stride, exact):
  """Transposed pulls [terms * stride, M*16]: high, low and zero terms."""
  if not exact:
    high = pull.astype(jnp.bfloat16).astype(jnp.float32)
    column = _iota(pull.shape, 1)
    pull = jnp.where(
      column < first + stride,
      high,
      jnp.where(column < first + 2 * stride, pull - high, 0.0),
    )
  turned = jnp.transpose(pull)[first:]
  return turned if exact else turned.astype(jnp.bfloat16)


def _pad_lanes(x, columns):
  if x.shape[1] == columns:
    return x
  zeros = jnp.zeros((x.shape[0], columns - x.shape[1]), x.dtype)
  return jnp.concatenate([x, zeros], axis=1)


def _iota(shape, dimension):
  return jax.lax.broadcasted_iota(jnp.int32, shape, dimension)


def _dot(a, b, b_axis=0, *, exact=False):
  return jax.lax.dot_general(
    a,
    b,
    (((1,), (b_axis,)), ((), ())),
    precision=jax.lax.Precision.HIGHEST if exact else None,
    preferred_element_type=jnp.float32,
  )


def _select_dot(a, selector, terms, b_axis=0):
  """Float32 times a 0/1 matrix, to 8 bits per term (all for a float32 one)."""
  if selector.dtype == jnp.float32:
    return _dot(a, selector, b_axis, exact=True)
  return sum(_dot(part, selector, b_axis) for part in _split(a, terms))


def _terms(x, exact):
  return [x] if exact else _split(x, 2)


def _split(x, terms):
  """Bfloat16 terms whose sum is x to about 8 bits per term."""
  parts = []
  for _ in range(terms):
    parts.append(x.astype(jnp.bfloat16))
    x = x - parts[-1].astype(jnp.float32)
  return parts


def _query_chunk(num_queries):
  """Queries per diagonal product: equal shares of at most `_QUERIES`."""
  return pl.cdiv(num_queries, pl.cdiv(num_queries, _QUERIES))


def _spans(num_queries):
  chunk = _query_chunk(num_queries)
  starts = range(0, num_queries, chunk)
  return [(start, min(start + chunk, num_queries)) for start in starts]


def _query_terms(query_QD, dtype):
  """[chunks, terms * queries of a chunk, D]: three bfloat16 terms, or one."""
  num_queries, width = query_QD.shape
  chunk = _query_chunk(num_queries)
  chunks = pl.cdiv(num_queries, chunk)
  query = jnp.pad(query_QD, ((0, chunks * chunk - num_queries), (0, 0)))
  query = query.reshape(chunks, chunk, width)
  if dtype == jnp.float32:
    return query
  terms = []
  for _ in range(3):
    # Not a cast there and back, which the compiler may drop.
    term = jax.lax.reduce_precision(query, exponent_bits=8, mantissa_bits=7)
    terms.append(term.astype(jnp.bfloat16))
    query = query - term
  return jnp.concatenate(terms, axis=1)


def _chunks(width, lanes):
  return [slice(i, min(i + lanes, width)) for i in range(0, width, lanes)]


def _count(count, num_slots):
  return jnp.reshape(
    jnp.asarray(num_slots if count is None else count, jnp.int32), (1,)
  )


def _flatten(sources):
  shape = sources[0].shape
  num_tokens = 1
  for axis in shape[:-1]:
    num_tokens *= axis
  if isinstance(sources, tuple):
    flat = [source.reshape(num_tokens, shape[-1]) for source in sources]
  else:
    # One operand per slot, all the same buffer: each has its own index map.
    flat = [sources.reshape(len(sources), num_tokens, shape[-1])] * len(sources)
  return shape[:-1], flat, num_tokens


def _source_specs(sources, tile, width, at):
  """Block specs of the sources; `at` maps grid indices to the token tile."""
  if isinstance(sources, tuple):
    return [
      pl.BlockSpec((tile, width), lambda *i: (at(*i[:-1]), 0)) for _ in sources
    ]

  def slot_spec(slot):
    def index(*i):
      # A slot that does not count stays at one block, which is read once.
      valid = slot < i[-1][0]
      return jnp.where(valid, slot, 0), jnp.where(valid, at(*i[:-1]), 0), 0

    return pl.BlockSpec((1, tile, width), index)

  return [slot_spec(slot) for slot in range(len(sources))]


def _whole(array):
  return pl.BlockSpec(array.shape, lambda *i: (0,) * array.ndim)


def _stats_shape(num_queries, tile):
  """Statistics of one tile: [query chunks, groups, (query, token)]."""
  chunk = _query_chunk(num_queries)
  return pl.cdiv(num_queries, chunk), tile // _GROUP, chunk * _GROUP


def _to_groups(x_QT, tile):
  """[Q, tokens] to [tiles, *_stats_shape], zero where there is no token."""
  num_queries, num_tokens = x_QT.shape
  chunks, groups, columns = _stats_shape(num_queries, tile)
  chunk = columns // _GROUP
  tiles = pl.cdiv(num_tokens, tile)
  pad = (0, chunks * chunk - num_queries), (0, tiles * tile - num_tokens)
  x = jnp.pad(x_QT, pad).reshape(chunks, chunk, tiles, groups, _GROUP)
  return x.transpose(2, 0, 3, 1, 4).reshape(tiles, chunks, groups, columns)


def _from_groups(x, num_queries, num_tokens):
  tiles, chunks, groups, columns = x.shape
  x = x.reshape(tiles, chunks, groups, columns // _GROUP, _GROUP)
  x = x.transpose(1, 3, 0, 2, 4).reshape(chunks * columns // _GROUP, -1)
  return x[:num_queries, :num_tokens]
