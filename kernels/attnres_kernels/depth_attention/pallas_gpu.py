# SPDX-License-Identifier: Apache-2.0
"""Depth attention on Nvidia GPUs (from Hopper on), in Pallas Mosaic GPU.

Both kernels read a token's sources from memory once (`token_walk`). The first
walk sums up, per source, its square and its products with queries and,
backward, with output gradients; the second walk writes mixtures or source
gradients. In between, every thread computes the same M x Q weights and keeps
them in shared memory.

The gradient of the queries is a sum over tokens.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from attnres_kernels import token_walk
from attnres_kernels.depth_attention import plain

# Of unrolled sources and pairs, and of sums that a thread holds at a time.
_SOURCES, _PAIRS, _SUMS = 64, 512, 40
# Shared memory for gradients of queries, of which two blocks fit.
_GRADIENT_BYTES = 90_000


def why_not(
  function: str, query_QD: jax.Array, sources: tuple[jax.Array, ...],
  *args: Any, eps: float, heads: int = 1, rank: int | None = None,
) -> str | None:  # fmt: skip
  """The reason why these arguments cannot run, or None."""
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
  if (pairs := len(sources) * num_queries) > _PAIRS:
    return f"at most {_PAIRS} scores per token, of all queries, got {pairs}"
  return None


why_slow = token_walk.why_slow


def forward(
  query_QD: jax.Array, sources: tuple[jax.Array, ...], *, eps: float,
  interpret: Any = None,
) -> tuple[tuple[jax.Array, ...], jax.Array]:  # fmt: skip
  """Returns the mixtures, a tuple of Q arrays, and their log-normalisers."""
  num_queries, width = query_QD.shape
  tiles = token_walk.Tiles(width)
  flat = list(map(tiles.view, sources))
  queries, slots = range(num_queries), range(len(flat))
  pairs = num_queries, len(flat)

  def attend(token: Any, given: Any, made: Any, held: Any) -> None:
    """Queries, sources; mixtures, lse; scores and weights, inverse norms."""
    query_ref, *source_refs = given
    *out_refs, lse_ref = made
    score_ref, weight_ref, _ = held
    _score(tiles, token, query_ref, source_refs, (), held, eps)
    for q in queries:
      scores = [score_ref[q, m] for m in slots]
      top = functools.reduce(jnp.maximum, scores)
      raised = [jnp.exp(score - top) for score in scores]
      total = token_walk.add(raised)
      lse_ref[q, token()] = top + jnp.log(total)
      for m in slots:
        weight_ref[q, m] = raised[m] / total

    def mix(rows: Any, place: Any, fresh: Any, carry: None) -> None:
      token_walk.settle()
      for span in token_walk.groups(num_queries, tiles.most):
        mixed: dict[int, Any] = {}
        for m, ref in enumerate(source_refs):
          x = tiles.load(ref.at[token(), rows])
          for q in span:
            term = x * weight_ref[q, m]
            mixed[q] = mixed[q] + term if m else term
        for q in span:
          tiles.store(out_refs[q].at[token(), rows], mixed[q])

    tiles.loop(mix, None)

  lse = jax.ShapeDtypeStruct((num_queries, len(flat[0])), jnp.float32)
  *outs, lse_QT = token_walk.walk(
    attend, "depth_attention_forward", tiles, [tiles.view(query_QD), *flat],
    [*[flat[0]] * num_queries, lse], scratch=[pairs, pairs, pairs[1:]],
    interpret=interpret,
  )  # fmt: skip
  *shape, _ = sources[0].shape
  outs = tuple(out.reshape(sources[0].shape) for out in outs)
  return outs, lse_QT.reshape(num_queries, *shape)


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
  queries, slots = range(num_queries), range(len(flat))
  pairs = num_queries, len(flat)

  def pull_back(token: Any, given: Any, made: Any, held: Any) -> None:
    """Queries, lse and dlse [Q, T], Q output gradients, sources; dsources.

    Held are scores and products, inverse norms, weights and factors, factors of
    sources, and query gradients.
    """
    query_ref, lse_ref, dlse_ref, *wide_refs = given
    dout_refs, source_refs = wide_refs[:num_queries], wide_refs[num_queries:]
    score_ref, product_ref, inverse_ref = held[:3]
    weight_ref, pull_ref, bend_ref, sum_ref = held[3:]
    _score(tiles, token, query_ref, source_refs, dout_refs, held, eps)
    bends: list[Any] = [0.0] * len(flat)
    for q in queries:
      # Large scores may differ from the forward pass's, which sums in another
      # order: normalise again, so that the weights sum to one.
      scores = [score_ref[q, m] for m in slots]
      weights = [jnp.exp(score - lse_ref[q, token()]) for score in scores]
      share = 1.0 / token_walk.add(weights)
      weights = [weight * share for weight in weights]
      products = [product_ref[q, m] for m in slots]
      mean = token_walk.add([w * x for w, x in zip(weights, products)])
      for m in slots:
        apart = products[m] - mean + dlse_ref[q, token()]
        pull = weights[m] * apart * inverse_ref[m]
        bends[m] += pull * scores[m]
        weight_ref[q, m] = weights[m]
        pull_ref[q, m] = pull
    for m in slots:
      bend_ref[m] = bends[m] * inverse_ref[m] * (1.0 / width)

    def write(rows: Any, place: Any, fresh: Any, carry: None) -> None:
      token_walk.settle()
      for group in token_walk.groups(len(flat), tiles.most):
        wide = [tiles.load(source_refs[m].at[token(), rows]) for m in group]
        dsources = [-bend_ref[m] * x for m, x in zip(group, wide)]
        for q in queries:
          query = tiles.load(query_ref.at[q, rows])
          dout = tiles.load(dout_refs[q].at[token(), rows])
          pulls = [pull_ref[q, m] for m in group]
          for i, m in enumerate(group):
            dsources[i] += weight_ref[q, m] * dout + pulls[i] * query
          dquery = token_walk.add(pull * x for pull, x in zip(pulls, wide))
          ref, first = sum_ref.at[q, place], group[0] == 0
          tiles.accumulate(ref, dquery, token(), first)
        for m, dsource in zip(group, dsources):
          tiles.store(made[m].at[token(), rows], dsource)

    tiles.loop(write, None)

  numbers = (x.reshape(num_queries, -1) for x in (lse_QT, dlse_QT))
  *dsources, dquery_QD = token_walk.walk(
    pull_back, "depth_attention_backward", tiles,
    [tiles.view(query_QD), *numbers, *map(tiles.view, douts), *flat], flat,
    scratch=[pairs, pairs, pairs[1:]] * 2, rows=num_queries,
    interpret=interpret,
  )  # fmt: skip
  return dquery_QD, tuple(x.reshape(sources[0].shape) for x in dsources)


def _score(
  tiles: token_walk.Tiles, token: Any, query_ref: Any, source_refs: Any,
  dout_refs: Any, held: Any, eps: float,
) -> None:  # fmt: skip
  """Fills scores, and inverse norms and products with output gradients."""
  score_ref, product_ref, inverse_ref, *_ = held
  num_queries = query_ref.shape[0]
  most = _SUMS // (1 + num_queries + len(dout_refs))
  for group in token_walk.groups(len(source_refs), most):

    def terms(rows: Any, group: Any = group) -> Any:
      wide = [tiles.load(source_refs[m].at[token(), rows]) for m in group]
      others = [query_ref.at[q, rows] for q in range(num_queries)]
      others += [ref.at[token(), rows] for ref in dout_refs]
      for x in wide:
        yield x * x
      for ref in others:
        other = tiles.load(ref)
        for x in wide:
          yield x * other

    number = len(group) * (1 + num_queries + len(dout_refs))
    sums = tiles.sums(number, terms)
    for i, m in enumerate(group):
      square, *products = sums[i :: len(group)]
      inverse = jax.lax.rsqrt(square * (1.0 / tiles.width) + eps)
      inverse_ref[m] = inverse
      for q in range(num_queries):
        score_ref[q, m] = products[q] * inverse
      for q in range(len(dout_refs)):
        product_ref[q, m] = products[num_queries + q]
    token_walk.settle()
