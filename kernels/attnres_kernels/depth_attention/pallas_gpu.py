# SPDX-License-Identifier: Apache-2.0
"""Depth attention on Nvidia GPUs (from Hopper on), in Pallas Mosaic GPU.

One warpgroup per token reads the token's sources twice, tile by tile. The first
pass sums up scores and, backward, the products with the output gradients. The
second pass writes mixtures or source gradients. Between the two, each thread
holds all M x Q statistics of the token in registers. The second pass finds the
sources of its token (M x D x 2 bytes, 41 kB in the 48B model) in a cache.

The backward kernel writes the factors of the sources, [M, T]. The query's
gradient is one product per source with those factors.

The backward pass has a kernel for one query only. Of several queries plain JAX
is faster (kernels/benchmarks/results/gpu.csv). Forms on clusters of thread
blocks, which never ran, are in commit c2dcbed (dev/LOG.md).
"""

import functools
import itertools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from attnres_kernels import warpgroup
from attnres_kernels.depth_attention import plain

_ROWS = 8  # Queries whose partial sums are held at the same time.
# Sources are unrolled, and the time to infer layouts grows with the square of
# the program: half a minute at 24 sources and eight queries.
_SOURCES = 32
_STATISTICS = 1024  # Of a token: sources times queries.


def why_not(
  function: str, query_QD: jax.Array, sources: tuple[jax.Array, ...],
  *args: Any, eps: float, heads: int = 1, rank: int | None = None,
) -> str | None:  # fmt: skip
  """The reason why these arguments cannot run, or None."""
  del function, args, eps
  num_queries, width = query_QD.shape
  reason = warpgroup.why_not(width, sources[:1], heads, rank)
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
  query_QD: jax.Array, sources: tuple[jax.Array, ...], *, eps: float,
  interpret: Any = None,
) -> tuple[tuple[jax.Array, ...], jax.Array]:  # fmt: skip
  """Returns the mixtures, a tuple of Q arrays, and their log-normalisers."""
  num_queries, width = query_QD.shape
  tiles = warpgroup.Tiles(width)
  flat = list(map(warpgroup.flatten, sources))
  num_tokens, num_slots = flat[0].shape[0], len(flat)

  def kernel(query_ref: Any, *refs: Any) -> None:
    """Query [Q, D], M sources [T, D]; out [Q, T, D], lse [T, Q]."""
    source_refs, (out_ref, lse_ref) = refs[:num_slots], refs[num_slots:]
    token = jax.lax.axis_index("program")

    def attend(span: slice) -> None:
      rows = span.stop - span.start
      scores = [
        _scores(tiles, ref.at[token], query_ref.at[span], eps)
        for ref in source_refs
      ]
      top = functools.reduce(jnp.maximum, scores)
      weights = [jnp.exp(score - top) for score in scores]
      total = functools.reduce(operator.add, weights)
      warpgroup.store(lse_ref.at[token, span], top + jnp.log(total))
      weights = [tiles.across(weight * (1.0 / total)) for weight in weights]

      def mix(columns: Any, fresh: Any, carry: None) -> None:
        mixed = tiles.zeros(rows)
        for ref, weight in zip(source_refs, weights, strict=True):
          mixed += tiles.down(tiles.load(ref.at[token, columns]), rows) * weight
        warpgroup.store(out_ref.at[span, token, columns], mixed)

      tiles.loop(mix, None)

    for span in _spans(num_queries):
      attend(span)

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
  query_QD: jax.Array, sources: tuple[jax.Array, ...], lse_QT: jax.Array,
  douts: tuple[jax.Array, ...], dlse_QT: jax.Array, *, eps: float,
  interpret: Any = None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:  # fmt: skip
  """Returns the gradients of the queries and of every source."""
  if len(query_QD) > 1:
    attend = functools.partial(plain.forward, eps=eps)
    return jax.vjp(attend, query_QD, sources)[1]((douts, dlse_QT))
  (query_D,), width = query_QD, query_QD.shape[1]
  tiles = warpgroup.Tiles(width)
  dout_TD, *flat = map(warpgroup.flatten, (*douts, *sources))
  num_tokens, num_slots = flat[0].shape[0], len(flat)

  def kernel(
    query_ref: Any, lse_ref: Any, dlse_ref: Any, dout_ref: Any, *refs: Any
  ) -> None:
    """Query [D], lse and dlse [T], dout and M sources [T, D].

    Then the results: M source gradients [T, D], factors of sources [M, T].
    """
    source_refs = refs[:num_slots]
    *dsource_refs, pull_ref = refs[num_slots:]
    token = jax.lax.axis_index("program")
    scores, products, inverses = [], [], []
    for ref in source_refs:

      def terms(columns: Any, ref: Any = ref) -> tuple[jax.Array, ...]:
        source = tiles.load(ref.at[token, columns])
        query = tiles.load(query_ref.at[columns])
        dout = tiles.load(dout_ref.at[token, columns])
        return source * query, source * dout, source * source

      score, product, square = tiles.sums(terms, 3)
      inverses.append(_inverse_rms(square, width, eps))
      scores.append(score * inverses[-1])
      products.append(product)
    weights = [jnp.exp(score - lse_ref[token]) for score in scores]
    # Large scores may differ from the forward pass's, which sums in another
    # order: normalise again, so that the weights still sum to one.
    share = 1.0 / functools.reduce(operator.add, weights)
    weights = [weight * share for weight in weights]
    mean = functools.reduce(
      operator.add, (w * x for w, x in zip(weights, products))
    )
    factors = []
    for slot, weight in enumerate(weights):
      pull = weight * (products[slot] - mean + dlse_ref[token]) * inverses[slot]
      bend = pull * scores[slot] * inverses[slot] * (1.0 / width)
      pull_ref[slot, token] = pull
      factors.append((weight, pull, bend))

    def write(columns: Any, fresh: Any, carry: None) -> None:
      dout = tiles.load(dout_ref.at[token, columns])
      query = tiles.load(query_ref.at[columns])
      for slot, (weight, pull, bend) in enumerate(factors):
        source = tiles.load(source_refs[slot].at[token, columns])
        dsource = weight * dout + pull * query - bend * source
        warpgroup.store(dsource_refs[slot].at[token, columns], dsource)

    tiles.loop(write, None)

  *dsources, pull_MT = warpgroup.call(
    kernel,
    "depth_attention_backward",
    out_type=[
      *map(warpgroup.like, flat),
      jax.ShapeDtypeStruct((num_slots, num_tokens), jnp.float32),
    ],
    grid=num_tokens,
    interpret=interpret,
  )(query_D, jnp.ravel(lse_QT), jnp.ravel(dlse_QT), dout_TD, *flat)
  dquery_D = jnp.zeros_like(query_D)
  for pull_T, source_TD in zip(pull_MT, flat):
    dquery_D += jnp.einsum(
      "t,td->d",
      pull_T,
      source_TD.astype(jnp.float32),
      precision=jax.lax.Precision.HIGHEST,
    )
  return dquery_D[None], tuple(x.reshape(sources[0].shape) for x in dsources)


def _scores(
  tiles: warpgroup.Tiles, row_ref: Any, query_ref: Any, eps: float
) -> jax.Array:
  """Scores [R] of a source's row ref [D] under queries, a ref [R, D]."""
  rows = query_ref.shape[0]

  def add(columns: Any, fresh: Any, carry: Any) -> Any:
    dots, squares = carry
    source = warpgroup.masked(tiles.load(row_ref.at[columns]), fresh)
    query = tiles.load(query_ref.at[:, columns])
    return dots + tiles.down(source, rows) * query, squares + source * source

  dots, squares = tiles.loop(add, (tiles.zeros(rows), tiles.zeros()))
  inverse = _inverse_rms(jnp.sum(squares), tiles.width, eps)
  return jnp.sum(dots, axis=1) * inverse


def _inverse_rms(square: jax.Array, width: int, eps: float) -> jax.Array:
  return jax.lax.rsqrt(square * (1.0 / width) + eps)


def _spans(num_queries: int) -> list[slice]:
  """Equal shares of at most `_ROWS` queries, up to one query."""
  number = -(-num_queries // _ROWS)
  ends = [i * num_queries // number for i in range(number + 1)]
  return [slice(*pair) for pair in itertools.pairwise(ends)]
