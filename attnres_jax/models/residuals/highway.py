# SPDX-License-Identifier: Apache-2.0
"""Highway networks: a gate between the stream and each output."""

from typing import Any

from flax import nnx
import jax

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models import linear
from attnres_jax.models import norm as norm_lib
from attnres_jax.models.residuals import prenorm
from attnres_jax.models.residuals import styles
from attnres_jax.models.residuals import tools

_START = -2.0  # Of the bias: an output starts with a weight of 0.12.


class Highway(prenorm.Stream):
  """A gate per channel (arXiv:1505.00387).

    g_l = sigmoid(W_l RMSNorm(h_l) + c_l)
    h_{l+1} = (1 - g_l) * h_l + g_l * f_l(h_l)

  The gate that writes v_l is g_{l+1} in arXiv:2603.15031 (section 2.1), which
  is the source of the equations. Our choices: W starts at zero and
  c at -2, the gate reads the stream behind a norm without gain, and its product
  runs in the dtype of activations.

  Attributes:
    matrix: W, [L, D, D].
    bias: c, [L, D].
  """

  style = styles.Style("Highway", "#2aa198", "o")
  certainty = styles.Certainty.PAPER

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.eps = config.norm_eps
    shape = self.num_sublayers, config.width
    self.matrix = tools.parameter("LDD", 0, *shape, config.width)
    # No decay: it would open all gates halfway.
    self.bias = tools.parameter("LD", _START, *shape, decays=False)

  def write(self, carry: jax.Array, slot: Any, y_BTD: jax.Array) -> jax.Array:
    normed_BTD = carry * norm_lib.inverse_rms(carry, self.eps)
    normed_BTD = tools.coefficient(normed_BTD)
    logits_BTD = linear.linear(
      normed_BTD.astype(self.dtype), slot.matrix[...], 1, carry.dtype
    )
    gate_BTD = jax.nn.sigmoid(logits_BTD + slot.bias[None, None])
    y_BTD = precision.widen(tools.save(y_BTD))
    return tools.save(carry + gate_BTD * (y_BTD - carry))
