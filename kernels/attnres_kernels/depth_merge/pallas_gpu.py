# SPDX-License-Identifier: Apache-2.0
"""Phase 2 on Nvidia GPUs (from Hopper on), in Pallas Mosaic GPU.

One partial sum or several values join the mixture. The first walk over a token
(`token_walk`) adds up the products of its rows with each other. From these,
every thread computes weights, norms and the gradients of the scores, and the
second walk writes. Gradients of query and gain are sums over tokens.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from attnres_kernels import token_walk

# Products of all rows with each other are in registers.
_MOST = 7


def why_not(
  function: str, out_TD: jax.Array, lse_T: jax.Array, query_D: jax.Array,
  partials: Any, *args: Any, eps: float, norm_eps: float, heads: int = 1,
  rank: int | None = None,
) -> str | None:  # fmt: skip
  """The reason why these arguments cannot run, or None."""
  if (number := len(jax.tree.leaves(partials))) > _MOST:
    return f"at most {_MOST} arrays to merge, got {number}"
  arrays = [out_TD, lse_T, query_D, *jax.tree.leaves((partials, args))]
  return token_walk.why_not(out_TD.shape[-1], arrays, heads, rank)


why_slow = token_walk.why_slow


def forward(
  out_TD: jax.Array, lse_T: jax.Array, query_D: jax.Array, partials: Any,
  gain_D: jax.Array | None, *, eps: float, norm_eps: float,
  interpret: Any = None,
) -> jax.Array:  # fmt: skip
  """Returns the merged mixture, normalised if there is a gain."""
  mixed = out_TD, *jax.tree.leaves(partials)
  tiles = token_walk.Tiles(query_D.shape[0], len(mixed))
  rows_1D = [x for x in (query_D, gain_D) if x is not None]
  wide = list(map(tiles.view, mixed))

  def merge(token: Any, given: Any, made: Any, held: Any) -> None:
    """Lse [T], mixture and partials; query, gain if given; the result."""
    lse_ref, refs = given[0], given[1 : 1 + len(wide)]
    query_ref, *gain_refs = given[1 + len(wide) :]

    def terms(rows: Any) -> Any:
      xs = [tiles.load(ref.at[token(), rows]) for ref in refs]
      yield from _products(xs, tiles.load(query_ref.at[0, rows]))

    sums = tiles.sums(_number(len(wide)), terms)
    weights, *_, norm = _weigh(
      sums, len(wide), lse_ref[token()], tiles.width, eps, norm_eps
    )
    if gain_refs:
      weights = [norm * weight for weight in weights]

    def write(rows: Any, place: Any, fresh: Any, carry: None) -> None:
      mixed = _dot(weights, [tiles.load(ref.at[token(), rows]) for ref in refs])
      for ref in gain_refs:
        mixed *= tiles.load(ref.at[0, rows])
      tiles.store(made[0].at[token(), rows], mixed)

    tiles.loop(write, None)

  (mixed_TD,) = token_walk.walk(
    merge, "depth_merge_forward", tiles,
    [jnp.ravel(lse_T), *wide, *map(tiles.view, rows_1D)], wide[:1],
    interpret=interpret,
  )  # fmt: skip
  return mixed_TD.reshape(out_TD.shape)


def backward(
  out_TD: jax.Array, lse_T: jax.Array, query_D: jax.Array, partials: Any,
  gain_D: jax.Array | None, dmixed_TD: jax.Array, *, eps: float,
  norm_eps: float, interpret: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
  """Returns the gradients of out, lse, query, partials and gain."""
  totals, structure = jax.tree.flatten(partials)
  tiles = token_walk.Tiles(query_D.shape[0], 1 + len(totals))
  rows_1D = [x for x in (query_D, gain_D) if x is not None]
  wide = [tiles.view(x) for x in (out_TD, *totals)]
  count = len(wide)

  def pull_back(token: Any, given: Any, made: Any, held: Any) -> None:
    """Lse [T], gradient, mixture, partials, rows; gradients of all but one."""
    lse_ref, dmixed_ref, refs = given[0], given[1], given[2 : 2 + count]
    query_ref, *gain_refs = given[2 + count :]
    *dwide_refs, dlse_ref = made
    (sum_ref,) = held

    def load(rows: Any) -> Any:
      """Tiles of the gradient, of it before the gain, and of mixed arrays."""
      pulled = dmixed = tiles.load(dmixed_ref.at[token(), rows])
      for ref in gain_refs:
        pulled = dmixed * tiles.load(ref.at[0, rows])
      return dmixed, pulled, [tiles.load(ref.at[token(), rows]) for ref in refs]

    def terms(rows: Any) -> Any:
      _, pulled, xs = load(rows)
      yield from _products(xs, tiles.load(query_ref.at[0, rows]))
      for x in xs:
        yield pulled * x

    sums = tiles.sums(_number(count) + count, terms)
    pulled = sums[_number(count) :]
    weights, scores, inverses, alongs, norm = _weigh(
      sums, count, lse_ref[token()], tiles.width, eps, norm_eps
    )
    norm, along = norm if gain_refs else 1.0, 0.0
    if gain_refs:
      along = norm * norm * norm * _dot(weights, pulled) * (1.0 / tiles.width)
    # Products of the rows with the gradient of the mixture.
    gains = [norm * x - along * y for x, y in zip(pulled, alongs)]
    dscores = [
      w * _dot(weights, [gain - other for other in gains])
      for w, gain in zip(weights, gains)
    ]
    dlse_ref[token()] = dscores[0]
    pulls = [d * inverse for d, inverse in zip(dscores[1:], inverses)]
    bends = [
      pull * score * inverse * (1.0 / tiles.width)
      for pull, score, inverse in zip(pulls, scores[1:], inverses)
    ]

    def write(rows: Any, place: Any, fresh: Any, carry: None) -> None:
      dmixed, pulled, xs = load(rows)
      query = tiles.load(query_ref.at[0, rows])
      mixed = _dot(weights, xs)
      through = norm * pulled - along * mixed
      tiles.store(dwide_refs[0].at[token(), rows], weights[0] * through)
      for i, (pull, bend) in enumerate(zip(pulls, bends), 1):
        dtotal = weights[i] * through - bend * xs[i] + pull * query
        tiles.store(dwide_refs[i].at[token(), rows], dtotal)
      added = _dot(pulls, xs[1:]), norm * dmixed * mixed
      for i, row in enumerate(added[: len(rows_1D)]):
        tiles.accumulate(sum_ref.at[i, place], row, token())

    tiles.loop(write, None)

  numbers = jnp.ravel(lse_T)
  *dwide, dlse_T, drows = token_walk.walk(
    pull_back, "depth_merge_backward", tiles,
    [numbers, tiles.view(dmixed_TD), *wide, *map(tiles.view, rows_1D)],
    [*wide, numbers], rows=len(rows_1D), interpret=interpret,
  )  # fmt: skip
  dout_TD, *dtotals = (x.reshape(out_TD.shape) for x in dwide)
  dpartials = jax.tree.unflatten(structure, dtotals)
  dgain_D = None if gain_D is None else drows[1]
  return dout_TD, dlse_T.reshape(lse_T.shape), drows[0], dpartials, dgain_D


def _products(xs: Sequence[Any], query: Any) -> Any:
  """Of rows with each other, and of all but the first with the query."""
  for i, x in enumerate(xs):
    for y in xs[: i + 1]:
      yield x * y
  for x in xs[1:]:
    yield x * query


def _number(rows: int) -> int:
  return rows * (rows + 1) // 2 + rows - 1


def _dot(xs: Sequence[Any], ys: Sequence[Any]) -> Any:
  return token_walk.add(x * y for x, y in zip(xs, ys, strict=True))


def _weigh(
  sums: Sequence[Any], rows: int, lse: Any, width: int, eps: float,
  norm_eps: float,
) -> tuple[list[Any], list[Any], list[Any], list[Any], Any]:  # fmt: skip
  """The softmax over a mixture and further rows, from sums of `_products`.

  Returns weights and scores of the rows, inverse r.m.s. of all but the first,
  products with the new mixture, and the inverse r.m.s. of that.
  """
  inverse_rms = lambda x, eps: jax.lax.rsqrt(x * (1.0 / width) + eps)
  each = range(rows)
  ends = [i * (i + 1) // 2 for i in range(rows + 1)]
  product = lambda i, j: sums[ends[max(i, j)] + min(i, j)]
  inverses = [inverse_rms(product(i, i), eps) for i in each[1:]]
  scores = [lse, *(x * y for x, y in zip(sums[ends[-1] :], inverses))]
  # Each is computed directly, so that small ones keep their precision.
  other = lambda i, j: 1.0 if i == j else jnp.exp(scores[j] - scores[i])
  weights = [1 / token_walk.add(other(i, j) for j in each) for i in each]
  alongs = [_dot(weights, [product(i, j) for j in each]) for i in each]
  square = jnp.maximum(_dot(weights, alongs), 0.0)
  return weights, scores, inverses, alongs, inverse_rms(square, norm_eps)
