# SPDX-License-Identifier: Apache-2.0
"""The definition, for derivatives of any order: sums are float32 or wider."""

from typing import Any

import jax
import jax.numpy as jnp

from attnres_kernels import dispatch


def forward(
  streams: tuple[jax.Array, ...], y: jax.Array, write_MT: jax.Array,
  mix_MMT: jax.Array, weight_MDC: jax.Array, bias_M: jax.Array,
  scale: jax.Array, *, eps: float, dtype: Any,
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:  # fmt: skip
  """Returns (new streams, the next read, logits); see `api.stream_mix`."""
  wide = dispatch.accumulator(*streams, y)
  old = jnp.stack(streams).astype(wide)
  new = jnp.einsum("ij...,i...d->j...d", mix_MMT.astype(wide), old)
  new += write_MT.astype(wide)[..., None] * y.astype(wide)[None]
  stored = new.astype(streams[0].dtype)
  new = stored.astype(wide)
  square = jnp.mean(jnp.square(new), axis=(0, -1))
  product = jnp.einsum("j...d,jdc->c...", new, weight_MDC.astype(wide))
  logits = product * jax.lax.rsqrt(square + eps)[None]
  ones = (1,) * (logits.ndim - 1)
  gate = bias_M.reshape(-1, *ones) + scale * logits[: len(streams)]
  h = jnp.einsum("j...,j...d->...d", jax.nn.sigmoid(gate), new)
  return tuple(stored), h.astype(dtype), logits
