# SPDX-License-Identifier: Apache-2.0
"""Gated MLP (arXiv:2002.05202)."""

from flax import nnx
import jax

from attnres_jax import config as config_lib
from attnres_jax.models import activation
from attnres_jax.models import linear


class SwiGLU(nnx.Module):
  """units(x W_gate, x W_up) W_down, without biases (`activation`)."""

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
    del segment_ids_BT
    gate_BTF = linear.linear(x_BTD, self.gate[...])
    up_BTF = linear.linear(x_BTD, self.up[...])
    units_BTF = activation.units(self.activation, gate_BTF, up_BTF)
    return linear.output(units_BTF, self.down)
