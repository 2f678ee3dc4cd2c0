# SPDX-License-Identifier: Apache-2.0
"""Depth attention on Nvidia GPUs (from Hopper on), in Pallas Mosaic GPU.

One warpgroup per token reads the token's sources twice, tile by tile. The first
pass sums up scores and, backward, the products with the output gradients. The
second pass writes mixtures or source gradients. Between the two, each thread
holds all M x Q statistics of the token in registers. The second pass finds the
sources of its token (M x D x 2 bytes, 41 kB in the 48B model) in a cache.

The backward kernel writes the factors of the sources, [T, M, Q]. The query
gradients are one matrix product per source with those factors.

Compiled, not run: values are checked in interpret mode, and the kernels are
lowered for H100 and H200 on a CPU. The automatic choice on GPUs is therefore
plain JAX. Forms on clusters of thread blocks, which also never ran, are in
commit c2dcbed (dev/LOG.md).
"""

import functools
import itertools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from attnres_kernels import warpgroup

_ROWS = 8  # Queries whose partial sums are held at the same time.
# Sources are unrolled, and the time to infer layouts grows with the square of
# the program: half a minute at 24 sources and eight queries.
_SOURCES = 32
_STATISTICS = 1024  # Of a token: sources times queries.


def why_not(
  function: str,
  query_QD: jax.Array,
  sources: tuple[jax.Array, ...],
  *args: Any,
  eps: float,
  heads: int = 1,
  rank: int | None = None,
) -> str | None:
  """The reason why these arguments cannot run, or None."""
  del function, args, eps
  if heads > 1 or rank is not None:
    return f"one head with keys of the full width, got {heads=}, {rank=}"
  num_queries, width = query_QD.shape
  reason = warpgroup.why_not(width, sources[:1])
  if reason is not None:
    return reason
  if query_QD.dtype != jnp.float32:
    return f"queries must be float32, got {query_QD.dtype}"
  if not sources[0].size:
    return f"there is no token in sources of {sources[0].shape}"
  if len(sources) > _SOURCES:
    return f"at most {_SOURCES} sources, got {len(sources)}"
  if len(sources) * num_queries > _STATISTICS:
    return (
      f"at most {_STATISTICS} scores per token, got query {query_QD.shape} with"
      f" {len(sources)} sources"
    )
  return None


def forward(
  query_QD: jax.Array,
  sources: tuple[jax.Array, ...],
  *,
  eps: float,
  interpret: Any = None,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
  """Returns the mixtures, a tuple of Q arrays, and their log-normalisers."""
  num_queries, width = query_QD.shape
  tiles = warpgroup.Tiles(width)
  flat = list(map(warpgroup.flatten, sources))
  num_tokens, num_slots = flat[0].shape[0], len(flat)

  def kernel(query_ref: Any, *refs: Any) -> None:
    """Query [Q, D], M sources [T, D]; out [Q, T, D], lse [T, Q]."""
    source_refs, (out_ref, lse_ref) = refs[:num_slots], refs[num_slots:]
    token = jax.lax.axis_index("program")
    for span in _spans(num_queries):
      rows = span.stop - span.start

      def load(columns: Any, span: slice = span) -> jax.Array:
        return tiles.load(query_ref.at[span, columns])

      scores = []
      for ref in source_refs:
        dots, squares = _products(tiles, ref.at[token], [load], rows)
        scores.append(dots[0] * _inverse_rms(squares, width, eps))
      top = functools.reduce(jnp.maximum, scores)
      weights = [jnp.exp(score - top) for score in scores]
      total = functools.reduce(operator.add, weights)
      warpgroup.store(lse_ref.at[token, span], top + jnp.log(total))
      weights = [tiles.across(weight * (1.0 / total)) for weight in weights]

      def mix(
        columns: Any,
        fresh: Any,
        carry: None,
        span: slice = span,
        rows: int = rows,
        weights: list[jax.Array] = weights,
      ) -> None:
        mixed = tiles.zeros(rows)
        for ref, weight in zip(source_refs, weights, strict=True):
          mixed += tiles.down(tiles.load(ref.at[token, columns]), rows) * weight
        warpgroup.store(out_ref.at[span, token, columns], mixed)

      tiles.loop(mix, None)

  out, lse = warpgroup.call(
    kernel,
    "depth_attention_forward",
    out_type=[
      jax.ShapeDtypeStruct((num_queries, num_tokens, width), flat[0].dtype),
      jax.ShapeDtypeStruct((num_tokens, num_queries), jnp.float32),
    ],
    grid=num_tokens,
    interpret=interpret,
  )(query_QD, *flat)
  shape = sources[0].shape
  lse = lse.T.reshape((num_queries, *shape[:-1]))
  return tuple(out.reshape((num_queries, *shape))), lse


def backward(
  query_QD: jax.Array,
  sources: tuple[jax.Array, ...],
  lse_QT: jax.Array,
  douts: tuple[jax.Array, ...],
  dlse_QT: jax.Array,
  *,
  eps: float,
  interpret: Any = None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  """Returns the gradients of the queries and of every source."""
  if len(query_QD) == 1:
    # Mosaic GPU infers no layout for a sum over one row of a matrix: the second
    # row has no gradient.
    twice = jnp.concatenate([query_QD, query_QD])
    lse_QT = jnp.concatenate([lse_QT, lse_QT])
    dlse_QT = jnp.concatenate([dlse_QT, jnp.zeros_like(dlse_QT)])
    douts = (*douts, jnp.zeros_like(douts[0]))
    dquery_QD, dsources = backward(
      twice, sources, lse_QT, douts, dlse_QT, eps=eps, interpret=interpret
    )
    return dquery_QD[:1], dsources
  num_queries, width = query_QD.shape
  tiles = warpgroup.Tiles(width)
  flat = list(map(warpgroup.flatten, sources))
  num_tokens, num_slots = flat[0].shape[0], len(flat)
  lse_TQ = lse_QT.reshape(num_queries, num_tokens).T
  dlse_TQ = dlse_QT.astype(jnp.float32).reshape(num_queries, num_tokens).T
  dout_QTD = jnp.stack(douts).reshape(num_queries, num_tokens, width)

  def kernel(
    query_ref: Any, lse_ref: Any, dlse_ref: Any, dout_ref: Any, *refs: Any
  ) -> None:
    """Query [Q, D], lse and dlse [T, Q], dout [Q, T, D], M sources [T, D].

    Then the results: M source gradients [T, D], factors of sources [T, M, Q].
    """
    source_refs = refs[:num_slots]
    *dsource_refs, pull_ref = refs[num_slots:]
    token = jax.lax.axis_index("program")
    factors = []
    for span in _spans(num_queries):
      rows = span.stop - span.start

      def load(columns: Any, span: slice = span) -> jax.Array:
        return tiles.load(query_ref.at[span, columns])

      def load_dout(columns: Any, span: slice = span) -> jax.Array:
        return tiles.load(dout_ref.at[span, token, columns])

      scores, products, inverses = [], [], []
      for ref in source_refs:
        (dots, product), squares = _products(
          tiles, ref.at[token], [load, load_dout], rows
        )
        inverses.append(_inverse_rms(squares, width, eps))
        scores.append(dots * inverses[-1])
        products.append(product)
      lse = tiles.load_stats(lse_ref.at[token, span])
      weights = [jnp.exp(score - lse) for score in scores]
      # Large scores may differ from the forward pass's, which sums in
      # another order: normalise again, so that the weights still sum to one.
      share = 1.0 / functools.reduce(operator.add, weights)
      weights = [weight * share for weight in weights]
      mean = functools.reduce(
        operator.add, (w * x for w, x in zip(weights, products))
      )
      shift = tiles.load_stats(dlse_ref.at[token, span]) - mean
      terms_of_slots = []
      for slot, weight in enumerate(weights):
        pull = weight * (products[slot] + shift) * inverses[slot]
        bend = pull * scores[slot] * inverses[slot] * (1.0 / width)
        warpgroup.store(pull_ref.at[token, slot, span], pull)
        terms_of_slots.append((weight, pull, jnp.sum(bend)))
      factors.append((span, terms_of_slots))

    def write(columns: Any, fresh: Any, carry: None) -> None:
      for slot, ref in enumerate(source_refs):
        source, dsource = tiles.load(ref.at[token, columns]), tiles.zeros()
        for span, terms_of_slots in factors:
          weight, pull, bend = terms_of_slots[slot]
          dsource -= bend * source
          terms = tiles.across(weight) * tiles.load(
            dout_ref.at[span, token, columns]
          )
          terms += tiles.across(pull) * tiles.load(query_ref.at[span, columns])
          dsource += jnp.sum(terms, axis=0)
        warpgroup.store(dsource_refs[slot].at[token, columns], dsource)

    tiles.loop(write, None)

  *dsources, pull_TMQ = warpgroup.call(
    kernel,
    "depth_attention_backward",
    out_type=[
      *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat),
      jax.ShapeDtypeStruct((num_tokens, num_slots, num_queries), jnp.float32),
    ],
    grid=num_tokens,
    interpret=interpret,
  )(query_QD, lse_TQ, dlse_TQ, dout_QTD, *flat)
  dquery_QD = jnp.zeros_like(query_QD)
  for slot, source_TD in enumerate(flat):
    dquery_QD += jnp.einsum(
      "tq,td->qd",
      pull_TMQ[:, slot],
      source_TD.astype(jnp.float32),
      precision=jax.lax.Precision.HIGHEST,
    )
  return dquery_QD, tuple(x.reshape(sources[0].shape) for x in dsources)


def _products(
  tiles: warpgroup.Tiles, row_ref: Any, loads: list[Any], rows: int
) -> tuple[list[jax.Array], jax.Array]:
  """Products of a source's row with each matrix, and its sum of squares.

  Args:
    tiles: of the row.
    row_ref: the row [D].
    loads: functions of columns, each a tile of a matrix [rows, D].
    rows: of the matrices.

  Returns:
    [rows] per matrix, and a scalar.
  """

  def add(columns: Any, fresh: Any, carry: Any) -> Any:
    dots, squares = carry
    source = warpgroup.masked(tiles.load(row_ref.at[columns]), fresh)
    wide = tiles.down(source, rows)
    dots = [dot + wide * load(columns) for dot, load in zip(dots, loads)]
    return dots, squares + source * source

  dots, squares = tiles.loop(
    add, ([tiles.zeros(rows) for _ in loads], tiles.zeros())
  )
  return [jnp.sum(dot, axis=1) for dot in dots], jnp.sum(squares)


def _inverse_rms(square: jax.Array, width: int, eps: float) -> jax.Array:
  return jax.lax.rsqrt(square * (1.0 / width) + eps)


def _spans(num_queries: int) -> list[slice]:
  """Equal shares of at most `_ROWS` queries, up to one query."""
  number = -(-num_queries // _ROWS)
  ends = [i * num_queries // number for i in range(number + 1)]
  return [slice(*pair) for pair in itertools.pairwise(ends)]
