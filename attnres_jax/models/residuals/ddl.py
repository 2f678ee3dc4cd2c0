# SPDX-License-Identifier: Apache-2.0
"""Deep Delta Learning: outputs are directions that are erased and rewritten."""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models import linear
from attnres_jax.models.residuals import prenorm
from attnres_jax.models.residuals import styles
from attnres_jax.models.residuals import tools

_KEY_EPS = 1e-5  # Added, squared, to the squared length of a key.


class DDL(prenorm.Stream):
  """One value channel, in the form of the authors' report.

    z = RMSNorm(x) * gain,   u = Core(z),   k = u / sqrt(|u|^2 + eps^2)
    v = w_v . z,   beta = 2 sigmoid(w_beta . z + b_beta)
    x <- x + beta k (v - k . x)                 (I - beta k k^T) x + beta v k

  From the report and the authors' code, which also have several value channels.
  beta starts at 1, the default of the released configurations, where k . x
  becomes v; at 0 sublayers would do nothing. Our choice: w_beta and w_v start
  like any matrix. All of this is in float32, and a final norm follows.

  Attributes:
    gain: of the norms, [L, D].
    value: w_v, [L, D].
    beta: w_beta, [L, D].
    beta_bias: b_beta, [L].
  """

  style = styles.Style("DDL", "#d07a2d", "o")
  certainty = styles.Certainty.CODE
  pre_norm = False

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.eps = config.norm_eps
    shape = self.num_sublayers, config.width
    matrix = linear.matrices(config.init_std, rngs)
    self.gain = tools.parameter("LD", 1, *shape)
    self.value = matrix("LD", *shape)
    self.beta = matrix("LD", *shape)
    self.beta_bias = tools.parameter("L", 0, self.num_sublayers)

  def write(self, carry: jax.Array, slot: Any, y_BTD: jax.Array) -> jax.Array:
    context_BTD = self._context(carry, slot)
    value_BT1 = _product(context_BTD, slot.value)
    beta_BT1 = _product(context_BTD, slot.beta) + slot.beta_bias[...]
    beta_BT1 = 2 * jax.nn.sigmoid(beta_BT1)

    y_BTD = precision.widen(tools.save(y_BTD))
    square_BT1 = jnp.sum(jnp.square(y_BTD), axis=-1, keepdims=True)
    length_BT1 = tools.coefficient(jnp.sqrt(square_BT1 + _KEY_EPS**2))
    key_BTD = y_BTD / length_BT1
    # What is erased is linear in x, along a direction that analysis holds
    # fixed; what is written is linear in y.
    fixed_BTD = tools.coefficient(key_BTD)
    erased_BT1 = jnp.sum(fixed_BTD * carry, axis=-1, keepdims=True)
    written_BT1 = tools.coefficient(beta_BT1 * value_BT1)
    erased_BT1 = tools.coefficient(beta_BT1) * erased_BT1
    return tools.save(carry + written_BT1 * key_BTD - erased_BT1 * fixed_BTD)

  def input(self, carry: jax.Array, slot: Any) -> jax.Array:
    return self._context(carry, slot).astype(self.dtype)

  def _context(self, carry: jax.Array, slot: Any) -> jax.Array:
    """z, the norm of the stream."""
    return tools.rms_norm(carry, slot.gain[...], self.eps)


def _product(x_BTD: jax.Array, weight_D: Any) -> jax.Array:
  """One product per token [B, T, 1], in full float32 precision."""
  exact = jax.lax.Precision.HIGHEST
  return jnp.einsum("BTD,DM->BTM", x_BTD, weight_D[:, None], precision=exact)
