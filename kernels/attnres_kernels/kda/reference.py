# SPDX-License-Identifier: Apache-2.0
"""KDA directly from its recurrence (Kimi Linear, Eq. 1): simple and slow.

Everything in float32, or float64 when any input is; gradients by autodiff.
"""

import jax
import jax.numpy as jnp


def step(
  q_BHK: jax.Array, k_BHK: jax.Array, v_BHV: jax.Array, g_BHK: jax.Array,
  beta_BH: jax.Array, state_BHKV: jax.Array, *, scale: float,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
  """One token: decay, then the delta rule, then the read."""
  dtype = state_BHKV.dtype
  q_BHK, k_BHK, v_BHV, g_BHK, beta_BH = (
    x.astype(dtype) for x in (q_BHK, k_BHK, v_BHV, g_BHK, beta_BH)
  )
  state_BHKV = jnp.exp(g_BHK)[..., None] * state_BHKV
  delta_BHV = beta_BH[..., None] * (v_BHV - _read(k_BHK, state_BHKV))
  state_BHKV += k_BHK[..., None] * delta_BHV[..., None, :]
  return _read(scale * q_BHK, state_BHKV), state_BHKV


def forward(
  q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array,
  state: jax.Array, *, scale: float, chunk_size: int,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
  """Returns the outputs and the last state; one scan step per token."""

  def body(state, token):
    q, k, v, g, beta = token
    o_BHV, state = step(q, k, v, g, beta, state, scale=scale)
    return state, o_BHV

  time_first = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta))
  state, o_TBHV = jax.lax.scan(body, state, time_first)
  return jnp.moveaxis(o_TBHV, 0, 1).astype(v.dtype), state


def _read(key_BHK: jax.Array, state_BHKV: jax.Array) -> jax.Array:
  return jnp.einsum(
    "bhk,bhkv->bhv", key_BHK, state_BHKV, precision=jax.lax.Precision.HIGHEST
  )
