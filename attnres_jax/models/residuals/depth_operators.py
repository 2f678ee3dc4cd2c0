# SPDX-License-Identifier: Apache-2.0
"""The operators of `attnres_kernels`, on each device's own tokens.

Every token attends over its own depth. Without a mesh, these are the operators
themselves.

For FLOPs, a (query, source) pair counts as a dot product and a weighted sum,
and a source as one mean square, however often its norm is recomputed.
"""

from collections.abc import Sequence
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnres_jax import sharding
from attnres_jax.models import linear
from attnres_jax.models import norm as norm_lib
import attnres_kernels


class Bank(NamedTuple):
  """Sources in one array, of which the first `count` are valid.

  Attributes:
    rows_MBTD: the array.
    count: a number, which may be known at run time only.
  """

  rows_MBTD: jax.Array
  count: jax.Array | int


Sources = Sequence[jax.Array] | Bank
# Where a mixture and an open source lie, if they are rows of arrays.
Rows = tuple[attnres_kernels.Row | None, attnres_kernels.Row | None]
# How they are sharded.
_SPECS: Any = sharding.QUERIED_TOKENS, sharding.WHOLE
_ROW: Any = attnres_kernels.Row(*_SPECS)


def sources_from(sources: Sources, first: int) -> tuple[jax.Array, ...]:
  """All but the first few sources, [B, T, D] each.

  The number of sources in a bank has to be known.
  """
  if isinstance(sources, Bank):
    count = operator.index(sources.count)
    return tuple(sources.rows_MBTD[i] for i in range(first, count))
  return tuple(sources[first:])


def depth_attention(
  query_QD: jax.Array,
  sources: Sources,
  *,
  eps: float,
  heads: int | None = None,
  rank: int | None = None,
  apart: bool = False,
  norm: norm_lib.RMSNorm | None = None,
) -> tuple[jax.Array, jax.Array]:
  """`attnres_kernels.depth_attention` of [B, T, D] sources."""
  if isinstance(sources, Bank):
    if norm is not None:
      raise ValueError("mixtures of a bank are normalised behind it")
    return _of_bank(query_QD, sources, eps=eps, heads=heads, rank=rank)

  # There is no gain to pass without a norm.
  gains = () if norm is None else (norm.gain[...],)
  options: dict[str, Any] = {} if norm is None else dict(norm_eps=norm.eps)

  def attend(query_QD, sources, gain_D=None):
    return attnres_kernels.depth_attention(
      query_QD, sources, eps=eps, norm_gain=gain_D, heads=heads, rank=rank,
      apart=apart, **options,
    )  # fmt: skip

  many = sharding.QUERIED_TOKENS
  in_specs = sharding.WHOLE, sharding.TOKENS, *[sharding.WHOLE] * len(gains)
  split = sharding.by_shards(attend, in_specs, (many, many))
  sources = tuple(sources)
  first, num_queries = sources[0], query_QD.shape[0]
  out_QBTD = jax.ShapeDtypeStruct((num_queries, *first.shape), first.dtype)
  axis_H = () if heads is None else (heads,)
  lse_QBT = jax.ShapeDtypeStruct((*out_QBTD.shape[:-1], *axis_H), jnp.float32)
  return linear.counted(
    split, query_QD, sources, *gains,
    flops=len(sources) * pair_flops(out_QBTD.shape, query_QD.shape[-1]),
    scanned=sources, outs=(out_QBTD, lse_QBT),
  )  # fmt: skip


def _of_bank(
  query_QD: jax.Array, bank: Bank, **options: Any
) -> tuple[jax.Array, jax.Array]:
  def attend(query_QD, rows_MBTD, count):
    return attnres_kernels.depth_attention(
      query_QD, rows_MBTD, num_sources=count, **options
    )

  many, whole = sharding.QUERIED_TOKENS, sharding.WHOLE
  split = sharding.by_shards(attend, (whole, many, whole), (many, many))
  return split(query_QD, bank.rows_MBTD, jnp.asarray(bank.count, jnp.int32))


def depth_attention_vjp(
  query_QD: jax.Array,
  rows_MBTD: jax.Array,
  count: jax.Array | int,
  lse_QBT: jax.Array,
  dout_QBTD: jax.Array,
  dlse_QBT: jax.Array,
  drows_MBTD: jax.Array,
  **options: Any,
) -> tuple[jax.Array, jax.Array]:
  """`attnres_kernels.depth_attention_vjp` of a bank."""

  def backward(query_QD, rows_MBTD, count, lse, dout, dlse, drows_MBTD):
    dquery_QD, drows_MBTD = attnres_kernels.depth_attention_vjp(
      query_QD, rows_MBTD, lse, dout, dlse,
      num_sources=count, accumulate=drows_MBTD, **options,
    )  # fmt: skip
    return dquery_QD[None], drows_MBTD

  many, whole = sharding.QUERIED_TOKENS, sharding.WHOLE
  split = sharding.by_shards(
    backward,
    (whole, many, whole, many, many, many, many),
    (sharding.PER_DEVICE, many),
  )
  dquery_PQD, drows_MBTD = split(
    query_QD, rows_MBTD, jnp.asarray(count, jnp.int32), lse_QBT, dout_QBTD,
    dlse_QBT, drows_MBTD,
  )  # fmt: skip
  return jnp.sum(dquery_PQD, axis=0), drows_MBTD


def through_bank(
  query_QD: jax.Array, bank: Bank, **options: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(mixtures, log-normalisers, the rows): a read on the way of a bank.

  Gradients of rows come back through the third result, and the read adds its
  own in place. Without it, they would be one more array like the bank.
  """

  @jax.custom_vjp
  def read(query_QD, rows_MBTD, count):
    out_QBTD, lse_QBT = depth_attention(
      query_QD, Bank(rows_MBTD, count), **options
    )
    return out_QBTD, lse_QBT, rows_MBTD

  def forward(*arguments):
    found = read(*arguments)
    return found, (*arguments, found[1])

  def backward(kept, gradients):
    return *depth_attention_vjp(*kept, *gradients, **options), None

  read.defvjp(forward, backward)
  return read(query_QD, bank.rows_MBTD, jnp.asarray(bank.count, jnp.int32))


def depth_merge(
  out_BTD: jax.Array,
  lse_BT: jax.Array,
  query_D: jax.Array,
  partial_BTD: jax.Array,
  rows: Rows = (None, None),
  *,
  eps: float,
  rank: int | None = None,
) -> jax.Array:
  """`attnres_kernels.depth_merge`; `rows` are those of both sources."""

  def merge(out_BTD, lse_BT, query_D, partial_BTD, rows):
    return attnres_kernels.depth_merge(
      out_BTD, lse_BT, query_D, partial_BTD, eps=eps, rank=rank,
      out_row=rows[0], partial_row=rows[1],
    )  # fmt: skip

  tokens = sharding.TOKENS
  in_specs = tokens, tokens, sharding.WHOLE, tokens, _specs(rows)
  split = sharding.by_shards(merge, in_specs, tokens)
  return linear.counted(
    split, out_BTD, lse_BT, query_D, partial_BTD, _with_arrays(rows),
    flops=pair_flops(partial_BTD.shape, query_D.size),
    scanned=partial_BTD, outs=out_BTD,
  )  # fmt: skip


def depth_merge_norm(
  out_BTD: jax.Array,
  lse_BT: jax.Array,
  query_D: jax.Array,
  partial_BTD: jax.Array,
  gain_D: jax.Array,
  rows: Rows = (None, None),
  sinks: attnres_kernels.Sinks | None = None,
  *,
  eps: float,
  norm_eps: float,
  rank: int | None = None,
  carry_on: bool = False,
) -> Any:
  """The normalised merge of `attnres_kernels.depth_merge_norm`.

  With sinks, a tuple of them and the merge; with `carry_on`, of the partial sum
  and the merge.

  The kernel could also add the last output to the open sum. Instead, the matrix
  product that computes the output adds it, and then writes no output at all.
  """

  def merge(out_BTD, lse_BT, query_D, partial_BTD, gain_D, rows, sinks):
    first, normed_BTD = attnres_kernels.depth_merge_norm(
      out_BTD, lse_BT, query_D, partial_BTD, None, gain_D,
      eps=eps, norm_eps=norm_eps, rank=rank,
      out_row=rows[0], partial_row=rows[1], sinks=sinks, carry_on=carry_on,
    )  # fmt: skip
    alone = sinks is None and not carry_on
    return normed_BTD if alone else (first, normed_BTD)

  tokens: Any = sharding.TOKENS
  whole, sink_specs, out_specs, outs = sharding.WHOLE, None, tokens, out_BTD
  if sinks is not None:
    sink_specs = attnres_kernels.Sinks(_ROW, tokens, tokens)
    out_specs, outs = (sink_specs, tokens), (sinks, out_BTD)
  elif carry_on:
    out_specs, outs = (tokens, tokens), (partial_BTD, out_BTD)
  split = sharding.by_shards(
    merge,
    (tokens, tokens, whole, tokens, whole, _specs(rows), sink_specs),
    out_specs,
  )
  return linear.counted(
    split, out_BTD, lse_BT, query_D, partial_BTD, gain_D, _with_arrays(rows),
    sinks,
    flops=pair_flops(partial_BTD.shape, query_D.size),
    scanned=partial_BTD, outs=outs,
  )  # fmt: skip


def _specs(rows: Rows) -> tuple[Any, ...]:
  """How rows are sharded."""
  return tuple(row and _ROW for row in rows)


def _with_arrays(rows: Rows) -> Rows:
  return jax.tree.map(jnp.asarray, rows)


def depth_read_norm(
  queries_LD: jax.Array,
  l: int,
  sources: tuple[Any, ...],
  gain_D: jax.Array,
  *,
  eps: float,
  norm_eps: float,
) -> jax.Array:
  """`attnres_kernels.depth_read_norm`."""

  def read(queries_LD, sources, gain_D):
    return attnres_kernels.depth_read_norm(
      queries_LD, l, sources, gain_D, eps=eps, norm_eps=norm_eps
    )

  tokens, whole = sharding.TOKENS, sharding.WHOLE
  split = sharding.by_shards(read, (whole, tokens, whole), tokens)
  first = sources[0]
  return linear.counted(
    split, queries_LD, sources, gain_D,
    flops=len(sources) * pair_flops(first.shape, queries_LD.shape[1]),
    scanned=sources, outs=first,
  )  # fmt: skip


def pair_flops(mixtures: Sequence[int], key_width: int) -> int:
  """FLOPs per source: a dot product of keys and a weighted sum of values.

  Args:
    mixtures: the shape of what is mixed, [..., D].
    key_width: of what is scored.
  """
  *tokens, width = mixtures
  return 2 * math.prod(tokens) * (width + key_width)
