# SPDX-License-Identifier: Apache-2.0
"""The hidden units of gated MLPs and experts, from their two products.

  silu   silu(g) u                                      (arXiv:2002.05202)
  situ   b tanh(g / b) sigmoid(g) c tanh(u / c)         (Kimi K3)

SiTU is about the same for small values, and bounded by b c.
"""

import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax import precision


def units(
  config: config_lib.ActivationConfig, gate: jax.Array, up: jax.Array
) -> jax.Array:
  """Hidden units of any shape, in the dtype of the products."""
  if config.name == "silu":
    return jax.nn.silu(gate) * up
  wide, up_wide = precision.widen(gate), precision.widen(up)
  opened = _bounded(wide, config.gate_bound) * jax.nn.sigmoid(wide)
  return (opened * _bounded(up_wide, config.up_bound)).astype(gate.dtype)


# Written out, because autodiff would keep its arguments apart from what makes
# them, and so write both halves of a product.
def gradients(
  config: config_lib.ActivationConfig,
  gate: jax.Array,
  up: jax.Array,
  dunits: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Gradients of both products, float32, given that of the units."""
  gate, up = precision.widen(gate), precision.widen(up)
  sigmoid = jax.nn.sigmoid(gate)
  if config.name == "silu":
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    return dunits * up * slope, dunits * gate * sigmoid
  gate_tanh = jnp.tanh(gate / config.gate_bound)
  up_tanh = jnp.tanh(up / config.up_bound)
  bounded = config.gate_bound * gate_tanh
  slope = sigmoid * (1 - gate_tanh**2 + bounded * (1 - sigmoid))
  return (
    dunits * config.up_bound * up_tanh * slope,
    dunits * bounded * sigmoid * (1 - up_tanh**2),
  )


def _bounded(x: jax.Array, bound: float) -> jax.Array:
  return bound * jnp.tanh(x / bound)
