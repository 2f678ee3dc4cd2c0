# SPDX-License-Identifier: Apache-2.0
"""Heads over depth: H softmaxes per query, each over a slice of the width.

A head's score is a dot product of slices. So the H scores of a query are the
scores of H queries that are zero outside of their slices: one matrix product,
without a transpose. A head's weight is spread over its slice.
"""

import jax
import jax.numpy as jnp


def options(
  width: int, key_width: int, heads: int | None, rank: int | None, given: str
) -> dict[str, int]:
  """Static options of a backend, few of them for one head and full keys.

  Raises ValueError, which names the given shapes, if they do not fit.
  """
  if heads is not None and (heads < 1 or width % heads):
    raise ValueError(f"heads={heads} must divide the width {width}; {given}")
  if rank is not None and (heads or 1) > 1:
    raise ValueError(f"rank={rank} needs one head, got heads={heads}")
  if rank is not None and not 1 <= rank <= width:
    raise ValueError(f"rank={rank} must be from 1 to the width {width}")
  if key_width != (width if rank is None else rank):
    more = "" if rank is None else f" with rank={rank}"
    raise ValueError(f"widths differ: {given}{more}")
  chosen = {"heads": heads} if heads is not None and heads > 1 else {}
  return chosen if rank is None else chosen | {"rank": rank}


def separate(query_QD: jax.Array, heads: int) -> jax.Array:
  """One query [Q * H, D] per head, zero outside of the head's slice."""
  if heads == 1:
    return query_QD
  num_queries, width = query_QD.shape
  slices = query_QD.reshape(num_queries, 1, heads, width // heads)
  selector = jnp.eye(heads, dtype=query_QD.dtype)[None, :, :, None]
  return (slices * selector).reshape(num_queries * heads, width)


def joined(separate_JD: jax.Array, heads: int) -> jax.Array:
  """The transpose of `separate`: head h has the h-th slice of its row."""
  if heads == 1:
    return separate_JD
  width = separate_JD.shape[-1]
  slices = separate_JD.reshape(-1, heads, heads, width // heads)
  return jnp.einsum("qhhk->qhk", slices).reshape(-1, width)


def spread(weight_H: jax.Array, heads: int, width: int) -> jax.Array:
  """A weight for each channel, from one for each head: [..., D].

  With a single head [..., 1], which broadcasts.
  """
  return weight_H if heads == 1 else jnp.repeat(weight_H, width // heads, -1)


def totals(product_D: jax.Array, heads: int) -> jax.Array:
  """The sum over each slice: [..., H]."""
  width = product_D.shape[-1]
  shape = (*product_D.shape[:-1], heads, width // heads)
  return jnp.sum(product_D.reshape(shape), axis=-1)
