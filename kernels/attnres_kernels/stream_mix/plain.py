# SPDX-License-Identifier: Apache-2.0
"""The op in plain JAX: separate streams, tokens last in coefficients.

Three passes over the streams: the write, the products, and the read. Autodiff
differentiates them.
"""

from collections.abc import Iterable
import functools
from typing import Any

import jax
import jax.numpy as jnp

from attnres_kernels import dispatch

Streams = tuple[jax.Array, ...]


def forward(
  streams: Streams, y: jax.Array, write_MT: jax.Array, mix_MMT: jax.Array,
  weight_MDC: jax.Array, bias_M: jax.Array, scale: jax.Array, *, eps: float,
  dtype: Any,
) -> tuple[Streams, jax.Array, jax.Array, jax.Array]:  # fmt: skip
  """Returns (new streams, the next read, logits, their inverse norm)."""
  new = _written(streams, y, write_MT, mix_MMT)
  wide = dispatch.accumulator(*new)
  square_T = _total(jnp.sum(jnp.square(x.astype(wide)), -1) for x in new)
  width = len(new) * new[0].shape[-1]
  inverse_T = jax.lax.rsqrt(square_T / width + eps)
  product_TC = _total(_project(x, w, wide) for x, w in zip(new, weight_MDC))
  logits_CT = inverse_T[None] * jnp.moveaxis(product_TC, -1, 0)
  h = _read(new, logits_CT[: len(new)], bias_M, scale, dtype)
  return new, h, logits_CT, inverse_T


def _written(
  streams: Streams, y: jax.Array, write_MT: jax.Array, mix_MMT: jax.Array
) -> Streams:
  wide = dispatch.accumulator(*streams, y)
  old = [x.astype(wide) for x in streams]
  return tuple(
    (
      _total(a_T[..., None] * x for a_T, x in zip(mix_MMT[:, j], old))
      + write_T[..., None] * y.astype(wide)
    ).astype(x.dtype)
    for j, (write_T, x) in enumerate(zip(write_MT, streams))
  )


def _read(
  new: Streams, logits_MT: jax.Array, bias_M: jax.Array, scale: jax.Array,
  dtype: Any,
) -> jax.Array:  # fmt: skip
  wide = dispatch.accumulator(*new)
  ones = (1,) * (logits_MT.ndim - 1)
  read_MT = jax.nn.sigmoid(bias_M.reshape(-1, *ones) + scale * logits_MT)
  h = _total(a_T[..., None] * x.astype(wide) for a_T, x in zip(read_MT, new))
  return h.astype(dtype)


def _project(x: jax.Array, weight_DC: jax.Array, wide: Any) -> jax.Array:
  product = jnp.einsum(
    "...d,dc->...c", x, weight_DC.astype(x.dtype), precision=dispatch.exact(x),
    preferred_element_type=dispatch.accumulator(x),
  )  # fmt: skip
  return product.astype(wide)


def _total(terms: Iterable[jax.Array]) -> jax.Array:
  return functools.reduce(jnp.add, terms)
