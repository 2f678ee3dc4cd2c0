# SPDX-License-Identifier: Apache-2.0
"""Phase 2 on Nvidia GPUs (from Hopper on), in Pallas Mosaic GPU.

The first walk over a token (`token_walk`) adds up the products of its rows with
each other. From these, every thread computes weights, norms and the gradient of
the score, and the second walk writes. The gradients of query and gain are sums
over tokens: every thread block adds up its tokens in shared memory and writes
one row of each, and XLA adds these rows.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from attnres_kernels import token_walk


def why_not(
  function: str, *args: Any, eps: float, norm_eps: float, heads: int = 1,
  rank: int | None = None,
) -> str | None:  # fmt: skip
  """The reason why these arguments cannot run, or None."""
  del function, eps, norm_eps
  arrays = [x for x in args if isinstance(x, jax.Array)]
  return token_walk.why_not(args[0].shape[-1], arrays, heads, rank)


def why_slow(function: str, out_TD: jax.Array, *args: Any, **options: Any):
  """The reason why the automatic choice takes plain JAX, or None."""
  return token_walk.why_slow(out_TD)


def forward(
  out_TD: jax.Array, lse_T: jax.Array, query_D: jax.Array,
  partial_TD: jax.Array, gain_D: jax.Array | None, *, eps: float,
  norm_eps: float, interpret: Any = None,
) -> jax.Array:  # fmt: skip
  """Returns the merged mixture, normalised if there is a gain."""
  tiles = token_walk.Tiles(query_D.shape[0])
  rows = [x for x in (query_D, gain_D) if x is not None]
  wide = [tiles.view(out_TD), tiles.view(partial_TD)]
  num_tokens = wide[0].shape[0]

  def kernel(lse_ref: Any, out_ref: Any, total_ref: Any, *refs: Any) -> None:
    """Lse [T], out and partial; query, gain if given; the result."""
    query_ref, *gain_refs, mixed_ref = refs

    def merge(token: Any) -> None:
      def terms(rows: Any) -> Any:
        out = tiles.load(out_ref.at[token, rows])
        total = tiles.load(total_ref.at[token, rows])
        yield from (total * total, total * tiles.load(query_ref.at[0, rows]))
        if gain_refs:
          yield from (out * out, out * total)

      square, product, *others = tiles.sums(2 + 2 * len(gain_refs), terms)
      inverse = jax.lax.rsqrt(square * (1.0 / tiles.width) + eps)
      ours, theirs = _two_weights(lse_ref[token], product * inverse)
      norm = 1.0
      if others:
        norm = _norm(tiles, ours, theirs, square, others, norm_eps)
      ours, theirs = ours * norm, theirs * norm

      def write(rows: Any, place: Any, fresh: Any, carry: None) -> None:
        mixed = ours * tiles.load(out_ref.at[token, rows])
        mixed += theirs * tiles.load(total_ref.at[token, rows])
        for ref in gain_refs:
          mixed *= tiles.load(ref.at[0, rows])
        tiles.store(mixed_ref.at[token, rows], mixed)

      tiles.loop(write, None)

    token_walk.each_token(num_tokens, merge)

  (mixed_TD,) = token_walk.call(
    kernel,
    "depth_merge_forward",
    tokens=num_tokens,
    out_type=[tiles.like(wide[0])],
    scratch=[],
    interpret=interpret,
  )(jnp.ravel(lse_T), *wide, *map(tiles.view, rows))
  return mixed_TD.reshape(out_TD.shape)


def backward(
  out_TD: jax.Array, lse_T: jax.Array, query_D: jax.Array, total_TD: jax.Array,
  gain_D: jax.Array | None, dmixed_TD: jax.Array, *, eps: float,
  norm_eps: float, interpret: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
  """Returns the gradients of out, lse, query, total and gain."""
  tiles = token_walk.Tiles(query_D.shape[0])
  rows = [x for x in (query_D, gain_D) if x is not None]
  wide = [tiles.view(x) for x in (out_TD, total_TD, dmixed_TD)]
  num_tokens = wide[0].shape[0]

  def kernel(
    lse_ref: Any, out_ref: Any, total_ref: Any, dmixed_ref: Any, *refs: Any
  ) -> None:
    """Lse [T], three arrays; query, gain if given.

    Then gradients of out, total and lse, and of query and gain [blocks, 1 or
    2]; and in shared memory the sums of the last.
    """
    row_refs, refs = refs[: len(rows)], refs[len(rows) :]
    query_ref, *gain_refs = row_refs
    dout_ref, dtotal_ref, dlse_ref, drows_ref, sum_ref = refs
    tiles.clear([sum_ref.at[i] for i in range(len(rows))])

    def load(token: Any, rows: Any) -> Any:
      """Tiles of out, total, their gradient, and it before the gain."""
      out, total, dmixed = (
        tiles.load(ref.at[token, rows])
        for ref in (out_ref, total_ref, dmixed_ref)
      )
      pulled = dmixed
      for ref in gain_refs:
        pulled = dmixed * tiles.load(ref.at[0, rows])
      return out, total, dmixed, pulled

    def pull_back(token: Any) -> None:
      def terms(rows: Any) -> Any:
        out, total, _, pulled = load(token, rows)
        yield from (total * total, total * tiles.load(query_ref.at[0, rows]))
        yield from (pulled * out, pulled * total)
        if gain_refs:
          yield from (out * out, out * total)

      square, product, pulled_out, pulled_total, *others = tiles.sums(
        4 + 2 * len(gain_refs), terms
      )
      inverse = jax.lax.rsqrt(square * (1.0 / tiles.width) + eps)
      score = product * inverse
      ours, theirs = _two_weights(lse_ref[token], score)
      norm, along = jnp.float32(1.0), jnp.float32(0.0)
      gap = pulled_total - pulled_out
      if others:
        norm = _norm(tiles, ours, theirs, square, others, norm_eps)
        along = ours * pulled_out + theirs * pulled_total
        along *= norm * norm * norm * (1.0 / tiles.width)
        out_square, cross = others
        apart = ours * (cross - out_square) + theirs * (square - cross)
        gap = norm * gap - along * apart
      dscore = ours * theirs * gap
      pull = dscore * inverse
      bend = pull * score * inverse * (1.0 / tiles.width)
      dlse_ref[token] = -dscore

      def write(rows: Any, place: Any, fresh: Any, carry: None) -> None:
        out, total, dmixed, pulled = load(token, rows)
        mixed = ours * out + theirs * total
        through = norm * pulled - along * mixed if gain_refs else pulled
        tiles.store(dout_ref.at[token, rows], ours * through)
        dtotal = theirs * through - bend * total
        dtotal += pull * tiles.load(query_ref.at[0, rows])
        tiles.store(dtotal_ref.at[token, rows], dtotal)
        added = pull * total, norm * dmixed * mixed
        for i in range(len(row_refs)):
          ref = sum_ref.at[i, place]
          tiles.store(ref, tiles.load(ref) + added[i])

      tiles.loop(write, None)

    token_walk.each_token(num_tokens, pull_back)
    block = jax.lax.axis_index("program")
    tiles.copy(
      [sum_ref.at[i] for i in range(len(rows))],
      [drows_ref.at[block, i] for i in range(len(rows))],
    )

  blocks = min(token_walk.BLOCKS, num_tokens)
  summed = len(rows), tiles.padded, tiles.vector
  dout_TD, dtotal_TD, dlse_T, drows = token_walk.call(
    kernel,
    "depth_merge_backward",
    tokens=num_tokens,
    out_type=[
      *map(tiles.like, wide[:2]),
      jax.ShapeDtypeStruct((num_tokens,), jnp.float32),
      jax.ShapeDtypeStruct((blocks, *summed), jnp.float32),
    ],
    scratch=[summed],
    interpret=interpret,
  )(jnp.ravel(lse_T), *wide, *map(tiles.view, rows))
  dquery_D, *dgain_D = tiles.unpad(jnp.sum(drows, axis=0))
  return (
    dout_TD.reshape(out_TD.shape),
    dlse_T.reshape(lse_T.shape),
    dquery_D,
    dtotal_TD.reshape(total_TD.shape),
    dgain_D[0] if dgain_D else None,
  )


def _norm(
  tiles: token_walk.Tiles, ours: Any, theirs: Any, square: Any,
  products: Sequence[Any], norm_eps: float,
) -> Any:  # fmt: skip
  """The inverse rms of the mixture.

  `products` are those of out with itself and with total, `square` is total's.
  """
  out_square, cross = products
  mean = ours * (ours * out_square + theirs * cross)
  mean += theirs * (ours * cross + theirs * square)
  return jax.lax.rsqrt(jnp.maximum(mean, 0.0) * (1.0 / tiles.width) + norm_eps)


def _two_weights(
  lse: jax.Array, score: jax.Array
) -> tuple[jax.Array, jax.Array]:
  # Each is computed directly, so that the smaller one keeps its precision.
  return 1 / (1 + jnp.exp(score - lse)), 1 / (1 + jnp.exp(lse - score))
