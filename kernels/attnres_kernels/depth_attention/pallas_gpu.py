# SPDX-License-Identifier: Apache-2.0
"""Depth attention on Nvidia GPUs (from Hopper on), in Pallas Mosaic GPU.

Both kernels read a token's sources from memory once (`token_walk`). The first
walk sums up, per source, its square and its products with queries and,
backward, with output gradients; the second walk writes mixtures or source
gradients. In between, every thread computes the same M x Q weights and keeps
them in shared memory.

The gradient of the queries is a sum over tokens. Every thread block adds up its
tokens in shared memory and writes one row per query; XLA adds these rows. There
are no atomics, so results repeat bit for bit.
"""

from typing import Any

import jax
import jax.numpy as jnp

from attnres_kernels import token_walk
from attnres_kernels.depth_attention import plain

# Sources and queries are unrolled.
_SOURCES, _PAIRS = 32, 256
# Sums that a thread holds at the same time, and tiles.
_SUMS, _TILES = 40, 3
# Shared memory for gradients of queries, of which two blocks fit.
_GRADIENT_BYTES = 90_000


def why_not(
  function: str, query_QD: jax.Array, sources: tuple[jax.Array, ...],
  *args: Any, eps: float, heads: int = 1, rank: int | None = None,
) -> str | None:  # fmt: skip
  """The reason why these arguments cannot run, or None."""
  del function, args, eps
  num_queries, width = query_QD.shape
  reason = token_walk.why_not(width, sources[:1], heads, rank)
  if reason is not None:
    return reason
  if query_QD.dtype != jnp.float32:
    return f"queries must be float32, got {query_QD.dtype}"
  if not sources[0].size:
    return f"there is no token in sources of {sources[0].shape}"
  if len(sources) > _SOURCES:
    return f"at most {_SOURCES} sources, got {len(sources)}"
  if len(sources) * num_queries > _PAIRS:
    return (
      f"at most {_PAIRS} scores per token, got query {query_QD.shape} with"
      f" {len(sources)} sources"
    )
  return None


def why_slow(
  function: str, query_QD: jax.Array, sources: tuple[jax.Array, ...],
  *args: Any, **options: Any,
) -> str | None:  # fmt: skip
  """The reason why the automatic choice takes plain JAX, or None."""
  return token_walk.why_slow(sources[0])


def forward(
  query_QD: jax.Array, sources: tuple[jax.Array, ...], *, eps: float,
  interpret: Any = None,
) -> tuple[tuple[jax.Array, ...], jax.Array]:  # fmt: skip
  """Returns the mixtures, a tuple of Q arrays, and their log-normalisers."""
  num_queries, width = query_QD.shape
  tiles = token_walk.Tiles(width)
  flat = list(map(tiles.view, sources))
  num_tokens, num_slots = flat[0].shape[0], len(flat)
  queries = range(num_queries)

  def kernel(query_ref: Any, *refs: Any) -> None:
    """Queries, M sources; Q mixtures, lse [Q, T]; weights [M * Q]."""
    source_refs, refs = refs[:num_slots], refs[num_slots:]
    *out_refs, lse_ref, weight_ref = refs

    def attend(token: Any) -> None:
      for group in token_walk.groups(num_slots, _SUMS // (num_queries + 1)):

        def terms(rows: Any, group: Any = group) -> Any:
          wide = [tiles.load(source_refs[m].at[token, rows]) for m in group]
          for x in wide:
            yield x * x
          for q in queries:
            query = tiles.load(query_ref.at[q, rows])
            for x in wide:
              yield x * query

        found = tiles.sums(len(group) * (num_queries + 1), terms)
        for i, m in enumerate(group):
          inverse = _inverse_rms(found[i], width, eps)
          for q in queries:
            score = found[(q + 1) * len(group) + i] * inverse
            weight_ref[m * num_queries + q] = score
      for q in queries:
        places = [m * num_queries + q for m in range(num_slots)]
        scores = [weight_ref[place] for place in places]
        top = scores[0]
        for score in scores[1:]:
          top = jnp.maximum(top, score)
        raised = [jnp.exp(score - top) for score in scores]
        total = token_walk.add(raised)
        lse_ref[q, token] = top + jnp.log(total)
        for place, x in zip(places, raised):
          weight_ref[place] = x / total

      def mix(rows: Any, place: Any, fresh: Any, carry: None) -> None:
        for span in token_walk.groups(num_queries, _TILES):
          mixed: dict[int, Any] = {}
          for m, ref in enumerate(source_refs):
            x = tiles.load(ref.at[token, rows])
            for q in span:
              term = x * weight_ref[m * num_queries + q]
              mixed[q] = mixed[q] + term if m else term
          for q in span:
            tiles.store(out_refs[q].at[token, rows], mixed[q])

      tiles.loop(mix, None)

    token_walk.each_token(num_tokens, attend)

  *outs, lse_QT = token_walk.call(
    kernel,
    "depth_attention_forward",
    tokens=num_tokens,
    out_type=[
      *[tiles.like(flat[0])] * num_queries,
      jax.ShapeDtypeStruct((num_queries, num_tokens), jnp.float32),
    ],
    scratch=[(num_slots * num_queries,)],
    interpret=interpret,
  )(tiles.view(query_QD), *flat)
  shape = sources[0].shape
  lse_QT = lse_QT.reshape((num_queries, *shape[:-1]))
  return tuple(out.reshape(shape) for out in outs), lse_QT


def backward(
  query_QD: jax.Array, sources: tuple[jax.Array, ...], lse_QT: jax.Array,
  douts: tuple[jax.Array, ...], dlse_QT: jax.Array, *, eps: float,
  interpret: Any = None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:  # fmt: skip
  """Returns the gradients of the queries and of every source."""
  num_queries, width = query_QD.shape
  tiles = token_walk.Tiles(width)
  if num_queries * tiles.padded * tiles.vector * 4 > _GRADIENT_BYTES:
    return plain.backward(query_QD, sources, lse_QT, douts, dlse_QT, eps=eps)
  flat = list(map(tiles.view, sources))
  num_tokens, num_slots = flat[0].shape[0], len(flat)
  queries, pairs = range(num_queries), num_slots * num_queries
  at = lambda m, q: m * num_queries + q

  def kernel(query_ref: Any, lse_ref: Any, dlse_ref: Any, *refs: Any) -> None:
    """Queries, lse and dlse [Q, T], Q output gradients, M sources.

    Then M source gradients, and query gradients [blocks, Q]; and in shared
    memory query gradients [Q], scores, weights and factors [M * Q], and [M].
    """
    dout_refs, refs = refs[:num_queries], refs[num_queries:]
    source_refs, refs = refs[:num_slots], refs[num_slots:]
    dsource_refs, refs = refs[:num_slots], refs[num_slots:]
    dquery_ref, sum_ref, score_ref, weight_ref, pull_ref, bend_ref = refs
    tiles.clear([sum_ref.at[q] for q in queries])

    def pull_back(token: Any) -> None:
      share: list[Any] = [0.0] * num_queries
      mean: list[Any] = [0.0] * num_queries
      for group in token_walk.groups(num_slots, _SUMS // (2 * num_queries + 1)):

        def terms(rows: Any, group: Any = group) -> Any:
          wide = [tiles.load(source_refs[m].at[token, rows]) for m in group]
          for x in wide:
            yield x * x
          for ref in (*(query_ref.at[q, rows] for q in queries),
                      *(ref.at[token, rows] for ref in dout_refs)):  # fmt: skip
            other = tiles.load(ref)
            for x in wide:
              yield x * other

        number = len(group)
        found = tiles.sums(number * (2 * num_queries + 1), terms)
        for i, m in enumerate(group):
          bend_ref[m] = inverse = _inverse_rms(found[i], width, eps)
          for q in queries:
            score = found[(1 + q) * number + i] * inverse
            product = found[(1 + num_queries + q) * number + i]
            weight = jnp.exp(score - lse_ref[q, token])
            share[q], mean[q] = share[q] + weight, mean[q] + weight * product
            score_ref[at(m, q)] = score
            weight_ref[at(m, q)] = weight
            pull_ref[at(m, q)] = product
      # Large scores may differ from the forward pass's, which sums in another
      # order: normalise again, so that the weights still sum to one.
      share = [1.0 / x for x in share]
      for m in range(num_slots):
        inverse, bend = bend_ref[m], 0.0
        for q in queries:
          weight = weight_ref[at(m, q)] * share[q]
          apart = pull_ref[at(m, q)] - mean[q] * share[q]
          pull = weight * (apart + dlse_ref[q, token]) * inverse
          bend += pull * score_ref[at(m, q)]
          weight_ref[at(m, q)] = weight
          pull_ref[at(m, q)] = pull
        bend_ref[m] = bend * inverse * (1.0 / width)

      def write(rows: Any, place: Any, fresh: Any, carry: None) -> None:
        for group in token_walk.groups(num_slots, _TILES):
          wide = [tiles.load(source_refs[m].at[token, rows]) for m in group]
          made = [-bend_ref[m] * x for m, x in zip(group, wide)]
          for q in queries:
            query = tiles.load(query_ref.at[q, rows])
            dout = tiles.load(dout_refs[q].at[token, rows])
            dquery = tiles.load(sum_ref.at[q, place])
            for i, m in enumerate(group):
              weight, pull = weight_ref[at(m, q)], pull_ref[at(m, q)]
              made[i] += weight * dout + pull * query
              dquery += pull * wide[i]
            tiles.store(sum_ref.at[q, place], dquery)
          for m, dsource in zip(group, made):
            tiles.store(dsource_refs[m].at[token, rows], dsource)

      tiles.loop(write, None)

    token_walk.each_token(num_tokens, pull_back)
    block = jax.lax.axis_index("program")
    tiles.copy(
      [sum_ref.at[q] for q in queries],
      [dquery_ref.at[block, q] for q in queries],
    )

  blocks = min(token_walk.BLOCKS, num_tokens)
  rows = num_queries, tiles.padded, tiles.vector
  *dsources, dquery = token_walk.call(
    kernel,
    "depth_attention_backward",
    tokens=num_tokens,
    out_type=[
      *map(tiles.like, flat),
      jax.ShapeDtypeStruct((blocks, *rows), jnp.float32),
    ],
    scratch=[rows, (pairs,), (pairs,), (pairs,), (num_slots,)],
    interpret=interpret,
  )(
    tiles.view(query_QD),
    lse_QT.reshape(num_queries, -1),
    dlse_QT.reshape(num_queries, -1),
    *map(tiles.view, douts),
    *flat,
  )
  dquery_QD = tiles.unpad(jnp.sum(dquery, axis=0))
  return dquery_QD, tuple(x.reshape(sources[0].shape) for x in dsources)


def _inverse_rms(square: jax.Array, width: int, eps: float) -> jax.Array:
  return jax.lax.rsqrt(square * (1.0 / width) + eps)
