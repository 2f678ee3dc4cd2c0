# SPDX-License-Identifier: Apache-2.0
"""Gated MLPs (arXiv:2002.05202), and the hidden units of theirs and of experts.

Hidden units are made from two products, g and u (`config.ActivationConfig`):

  silu   silu(g) u
  situ   b tanh(g / b) sigmoid(g) c tanh(u / c)         (Kimi K3)

SiTU is about the same for small values, and bounded by b c.
"""

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models import linear


class SwiGLU(nnx.Module):
  """units(x W_gate, x W_up) W_down, without biases."""

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    width, hidden = config.width, config.mlp_size
    self.activation = config.activation
    matrix = linear.matrices(config.init_std, rngs)
    self.gate = matrix("D|F", width, hidden)
    self.up = matrix("D|F", width, hidden)
    self.down = matrix("F|D", hidden, width)

  def scale_values(self, factor: float) -> None:
    """Multiplies all weights."""
    linear.scale(factor, self.gate, self.up, self.down)

  def __call__(
    self, x_BTD: jax.Array, segment_ids_BT: jax.Array | None = None
  ) -> jax.Array:
    """Maps every token independently, so documents do not matter."""
    gate_BTF = linear.linear(x_BTD, self.gate[...])
    up_BTF = linear.linear(x_BTD, self.up[...])
    units_BTF = units(self.activation, gate_BTF, up_BTF)
    return linear.output(units_BTF, self.down)


def units(
  config: config_lib.ActivationConfig, gate: jax.Array, up: jax.Array
) -> jax.Array:
  """Hidden units of any shape, in the dtype of the products."""
  if config.name == "silu":
    return jax.nn.silu(gate) * up
  wide, up_wide = precision.widen(gate), precision.widen(up)
  opened = _bounded(wide, config.gate_bound) * jax.nn.sigmoid(wide)
  return (opened * _bounded(up_wide, config.up_bound)).astype(gate.dtype)


def _bounded(x: jax.Array, bound: float) -> jax.Array:
  return bound * jnp.tanh(x / bound)
