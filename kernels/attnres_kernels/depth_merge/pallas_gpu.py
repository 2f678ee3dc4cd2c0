# SPDX-License-Identifier: Apache-2.0
"""Phase 2 on Nvidia GPUs (from Hopper on), in Pallas Mosaic GPU.

One warpgroup per token computes the sums that determine the weights, then the
sum of squares of the mixture, then the result tile by tile. A token's row is a
few kilobytes, so all passes except the first read it from the nearest cache.
The gradients of query and gain are sums over tokens: the backward kernel writes
their factors, three numbers per token, and matrix products follow.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attnres_kernels import warpgroup


def why_not(
  function: str, *args: Any, eps: float, norm_eps: float, heads: int = 1,
  rank: int | None = None,
) -> str | None:  # fmt: skip
  """The reason why these arguments cannot run, or None."""
  del function, eps, norm_eps
  arrays = [x for x in args if isinstance(x, jax.Array)]
  return warpgroup.why_not(args[0].shape[-1], arrays, heads, rank)


def forward(
  out_TD: jax.Array, lse_T: jax.Array, query_D: jax.Array,
  partial_TD: jax.Array, gain_D: jax.Array | None, *, eps: float,
  norm_eps: float, interpret: Any = None,
) -> jax.Array:  # fmt: skip
  """Returns the merged mixture, normalised if there is a gain."""
  tiles = warpgroup.Tiles(query_D.shape[0])
  wide = map(warpgroup.flatten, (out_TD, partial_TD))
  operands = [query_D, jnp.ravel(lse_T), *wide]
  operands += [] if gain_D is None else [gain_D]

  def kernel(
    query_ref: Any, lse_ref: Any, out_ref: Any, partial_ref: Any, *refs: Any
  ) -> None:
    """Query [D], lse [T], out and partial [T, D], gain [D] if given.

    Then the result [T, D].
    """
    *gain_refs, mixed_ref = refs
    token = jax.lax.axis_index("program")
    out, partial = out_ref.at[token], partial_ref.at[token]
    score, _ = _score(tiles, query_ref, partial, eps)
    mixed = _mixed(tiles, out, partial, *_two_weights(lse_ref[token], score))
    inverse = jnp.float32(1.0)
    if gain_refs:
      (square,) = tiles.sums(lambda columns: (jnp.square(mixed(columns)),), 1)
      inverse = jax.lax.rsqrt(square * (1.0 / tiles.width) + norm_eps)

    def write(columns: Any, fresh: Any, carry: None) -> None:
      result = mixed(columns)
      for ref in gain_refs:
        result *= inverse * tiles.load(ref.at[columns])
      warpgroup.store(mixed_ref.at[token, columns], result)

    tiles.loop(write, None)

  (mixed_TD,) = warpgroup.call(
    kernel,
    "depth_merge_forward",
    out_type=[warpgroup.like(operands[2])],
    grid=operands[1].shape[0],
    interpret=interpret,
  )(*operands)
  return mixed_TD.reshape(out_TD.shape)


def backward(
  out_TD: jax.Array, lse_T: jax.Array, query_D: jax.Array, total_TD: jax.Array,
  gain_D: jax.Array | None, dmixed_TD: jax.Array, *, eps: float,
  norm_eps: float, interpret: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
  """Returns the gradients of out, lse, query, total and gain."""
  tiles = warpgroup.Tiles(query_D.shape[0])
  wide = list(map(warpgroup.flatten, (out_TD, total_TD, dmixed_TD)))
  operands = [query_D, jnp.ravel(lse_T), *wide]
  operands += [] if gain_D is None else [gain_D]
  num_tokens = operands[1].shape[0]

  def kernel(
    query_ref: Any, lse_ref: Any, out_ref: Any, total_ref: Any,
    dmixed_ref: Any, *refs: Any,
  ) -> None:  # fmt: skip
    """Query [D], lse [T], three arrays [T, D], gain [D] if given.

    Then the results: gradients [T, D] of out and total, [T] of lse, and factors
    [3, T]: of total in the query's gradient; of out and total in the gain's.
    """
    *gain_refs, dout_ref, dtotal_ref, dlse_ref, factors_ref = refs
    token = jax.lax.axis_index("program")
    out, total = out_ref.at[token], total_ref.at[token]
    score, inverse = _score(tiles, query_ref, total, eps)
    out_weight, partial_weight = _two_weights(lse_ref[token], score)
    mixed = _mixed(tiles, out, total, out_weight, partial_weight)
    norm, along = jnp.float32(1.0), jnp.float32(0.0)

    def pulled(columns: Any) -> jax.Array:
      x = tiles.load(dmixed_ref.at[token, columns])
      for ref in gain_refs:
        x *= tiles.load(ref.at[columns])
      return x

    if gain_refs:

      def terms(columns: Any) -> tuple[jax.Array, jax.Array]:
        x = mixed(columns)
        return x * x, x * pulled(columns)

      square, product = tiles.sums(terms, 2)
      norm = jax.lax.rsqrt(square * (1.0 / tiles.width) + norm_eps)
      along = product * norm * norm * norm * (1.0 / tiles.width)

    def through_norm(columns: Any) -> jax.Array:
      x = norm * pulled(columns)
      return x - along * mixed(columns) if gain_refs else x

    def difference(columns: Any) -> tuple[jax.Array]:
      gap = tiles.load(total.at[columns]) - tiles.load(out.at[columns])
      return (through_norm(columns) * gap,)

    dscore = out_weight * partial_weight * tiles.sums(difference, 1)[0]
    pull = dscore * inverse
    bend = pull * score * inverse * (1.0 / tiles.width)
    dlse_ref[token] = -dscore
    for i, factor in enumerate(
      (pull, out_weight * norm, partial_weight * norm)
    ):
      factors_ref[i, token] = factor

    def write(columns: Any, fresh: Any, carry: None) -> None:
      dmixed = through_norm(columns)
      dtotal = partial_weight * dmixed - bend * tiles.load(total.at[columns])
      dtotal += pull * tiles.load(query_ref.at[columns])
      warpgroup.store(dout_ref.at[token, columns], out_weight * dmixed)
      warpgroup.store(dtotal_ref.at[token, columns], dtotal)

    tiles.loop(write, None)

  dout_TD, dtotal, dlse, (pull_T, out_factor_T, partial_factor_T) = (
    warpgroup.call(
      kernel,
      "depth_merge_backward",
      out_type=[
        *map(warpgroup.like, (wide[0], wide[1], operands[1])),
        jax.ShapeDtypeStruct((3, num_tokens), jnp.float32),
      ],
      grid=num_tokens,
      interpret=interpret,
    )(*operands)
  )
  out, total, dmixed = (x.astype(jnp.float32) for x in wide)
  dgain_D = None
  if gain_D is not None:
    normed = out_factor_T[:, None] * out + partial_factor_T[:, None] * total
    dgain_D = jnp.sum(dmixed * normed, axis=0)
  return (
    dout_TD.reshape(out_TD.shape),
    dlse.reshape(lse_T.shape),
    jnp.einsum("t,td->d", pull_T, total, precision=jax.lax.Precision.HIGHEST),
    dtotal.reshape(total_TD.shape),
    dgain_D,
  )


def _mixed(
  tiles: warpgroup.Tiles, out: Any, total: Any, out_weight: Any,
  partial_weight: Any,
) -> Callable[[Any], jax.Array]:  # fmt: skip
  """A function of columns: the mixture with the partial sum, row refs [D]."""
  return lambda columns: (
    out_weight * tiles.load(out.at[columns])
    + partial_weight * tiles.load(total.at[columns])
  )


def _score(
  tiles: warpgroup.Tiles, query_ref: Any, total: Any, eps: float
) -> tuple[jax.Array, jax.Array]:
  """The score of a row ref [D], and its inverse rms."""

  def terms(columns: Any) -> tuple[jax.Array, jax.Array]:
    x = tiles.load(total.at[columns])
    return x * x, x * tiles.load(query_ref.at[columns])

  square, product = tiles.sums(terms, 2)
  inverse = jax.lax.rsqrt(square * (1.0 / tiles.width) + eps)
  return product * inverse, inverse


def _two_weights(
  lse: jax.Array, score: jax.Array
) -> tuple[jax.Array, jax.Array]:
  # Each is computed directly, so that the smaller one keeps its precision.
  return 1 / (1 + jnp.exp(score - lse)), 1 / (1 + jnp.exp(lse - score))
