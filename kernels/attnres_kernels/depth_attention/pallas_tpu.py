# SPDX-License-Identifier: Apache-2.0
"""Depth attention on TPU. Forward, it reads the sources once.

With `v` of rows (source, token), see `pallas_tpu_tiles`, for each head:

  scores    query terms x v^T, one product for all queries of 16 tokens
  mixtures  weights x v per group, the weights [(query, token), (source,
            token)] on the token diagonal, in two bfloat16 terms
"""

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attnres_kernels import pallas_tpu_rows as tpu_rows
from attnres_kernels.depth_attention import pallas_tpu_tiles as tiles
from attnres_kernels.depth_attention.pallas_tpu_backward import backward
from attnres_kernels.depth_attention.pallas_tpu_tiles import why_not

__all__ = ["backward", "forward", "why_not"]


def forward(
  query_QD: jax.Array, sources: tuple[jax.Array, ...], *, eps: float,
  heads: int = 1, rank: int | None = None, interpret: Any = False,
) -> tuple[tuple[jax.Array, ...], jax.Array]:  # fmt: skip
  """Returns the mixtures, a tuple of Q arrays, and their log-normalisers."""
  num_queries, num_slots, first = len(query_QD), len(sources), sources[0]
  slabs = *sources, *[first] * num_queries
  call = tiles.call_of(slabs, first.shape[-1], heads)
  columns = tiles.Columns(call.width, heads, rank)
  terms = columns.query_terms(query_QD, first.dtype)
  softmaxes = heads * num_queries
  *out, lse = pl.pallas_call(
    functools.partial(
      _kernel,
      num_slots=num_slots,
      num_tokens=call.tokens,
      columns=columns,
      eps=eps,
    ),
    grid=(call.tiles,),
    in_specs=[
      tpu_rows.constant_spec(terms.shape),
      *[call.wide_spec()] * num_slots,
    ],
    out_specs=[*[call.wide_spec()] * num_queries, call.stats_spec(softmaxes)],
    out_shape=[*[call.like(first)] * num_queries, call.stats_out(softmaxes)],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel",),
      vmem_limit_bytes=call.vmem_limit(terms.nbytes),
    ),
    cost_estimate=tiles.cost(call, 4, num_queries, num_slots),
    interpret=interpret,
    name="depth_attention_forward",
  )(terms, *map(call.flat, sources))
  out = tuple(x.reshape(first.shape) for x in out)
  return out, call.from_stats(lse, first.shape[:-1], heads)


def _kernel(
  terms_ref: Any, *refs: Any, num_slots: int, num_tokens: int,
  columns: tiles.Columns, eps: float,
) -> None:  # fmt: skip
  """Query terms [terms * Q, D], M sources [tile, D].

  Then the results: Q mixtures [tile, D], log-normalisers [1, J, tile].
  """
  *source_and_out_refs, lse_ref = refs
  source_refs = source_and_out_refs[:num_slots]
  out_refs = source_and_out_refs[num_slots:]
  num_queries, tile = len(out_refs), lse_ref.shape[2]
  exact = out_refs[0].dtype == jnp.float32
  base = pl.program_id(0) * tile

  def loader(start: int, rows: int) -> tpu_rows.Load:
    valid = tpu_rows.valid_rows(num_tokens, tile, base + start, rows)
    at = slice(start, start + rows)
    return functools.partial(tiles.load_sources, source_refs, at, valid)

  groups: list[Any] = []
  lses = []
  for first in range(0, tile, tpu_rows.ROWS):
    # Scores need no diagonal: use whole row tiles, as in memory.
    load = loader(first, tpu_rows.ROWS)
    raw = jnp.concatenate(
      [
        tiles.sum_terms(
          tiles.total(
            tiles.dot(
              columns.owned(piece, head, terms_ref[:, piece]), load(piece), 1,
              exact=exact,
            )
            for piece in columns.of(head)
          ),
          num_queries,
        )
        for head in range(columns.heads)
      ],
      axis=0,
    )  # fmt: skip
    score = jnp.transpose(raw) * columns.inverse_rms(load, eps)
    score = score.reshape(num_slots, -1, tiles.GROUP, score.shape[1])
    # The largest exponent is 0: without the shift, exp overflows from 89 on.
    top = jnp.max(score, axis=0)
    weight = jnp.exp(score - top[None])
    total = jnp.sum(weight, axis=0)
    lses.append((top + jnp.log(total)).reshape(tpu_rows.ROWS, -1))
    weight = weight / total[None]
    for half in range(tpu_rows.ROWS // tiles.GROUP):
      left = weight[:, half].reshape(-1, weight.shape[-1])
      start = first + half * tiles.GROUP
      groups.append((start, _diagonal_weights(left, exact)))

  # A second sweep, so that the statistics of all groups can overlap.
  rows = num_queries * tiles.GROUP
  for start, weights in groups:
    load = loader(start, tiles.GROUP)
    for piece in columns.pieces:
      source = load(piece)
      # High and low weights stand side by side, so that one product over the
      # sources twice adds both terms.
      if not exact:
        source = jnp.concatenate([source, source], axis=0)
      mixed = columns.select(
        piece,
        lambda head, w=weights, x=source: tiles.dot(
          w[head * rows : (head + 1) * rows], x, exact=exact
        ),
      )
      mixed = mixed.astype(out_refs[0].dtype)
      mixed = mixed.reshape(num_queries, tiles.GROUP, -1)
      for query, out_ref in enumerate(out_refs):
        out_ref[start : start + tiles.GROUP, piece] = mixed[query]

  lse_ref[0] = jnp.transpose(jnp.concatenate(lses, axis=0))


def _diagonal_weights(weight: jax.Array, exact: bool) -> jax.Array:
  """[M*8, Q] to the left operand of the mixtures, rows (query, token).

  Columns are (source, token), of the high and then of the low terms.
  """
  if not exact:
    weight = jnp.concatenate(tiles.high_and_low(weight), axis=0)
  turned = jnp.transpose(weight)
  shape = (tiles.GROUP, turned.shape[1])
  # Off the diagonal, a token would read the sources of its neighbours.
  mask = tiles.on_diagonal(tiles.iota(shape, 0), tiles.iota(shape, 1))
  left = jnp.concatenate(
    [
      jnp.where(mask, jnp.broadcast_to(turned[q : q + 1], shape), 0.0)
      for q in range(turned.shape[0])
    ],
    axis=0,
  )
  return left if exact else left.astype(jnp.bfloat16)
