# SPDX-License-Identifier: Apache-2.0
"""Static factors of each output: ReZero and LayerScale."""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models.residuals import prenorm
from attnres_jax.models.residuals import styles
from attnres_jax.models.residuals import tools


class ReZero(prenorm.Stream):
  """One factor per sublayer (arXiv:2003.04887).

    h_{l+1} = h_l + a_l Core_l(h_l)

  Sublayers have no norm. All a_l start at zero, so that the network starts as
  the identity; then only they, the final norm and the head get gradients in the
  first step. Equation and start are from the table of arXiv:2603.15031 and the
  authors' code, where both sublayers of a block share a factor; the final norm
  is our choice.

  Attributes:
    factor: a, [L].
  """

  style = styles.Style("ReZero", "#b58900", "o")
  certainty = styles.Certainty.PAPER
  pre_norm = False

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    # No decay: zero switches a sublayer off.
    self.factor = tools.parameter("L", 0, self.num_sublayers, decays=False)

  def write(self, carry: jax.Array, slot: Any, y_BTD: jax.Array) -> jax.Array:
    # One factor, or one for each channel.
    factor_11D = jnp.reshape(slot.factor[...], (1, 1, -1))
    y_BTD = precision.widen(tools.save(y_BTD))
    return tools.save(carry + factor_11D * y_BTD)


class LayerScale(ReZero):
  """One factor per sublayer and channel (arXiv:2103.17239).

    h_{l+1} = h_l + lambda_l * f_l(h_l)

  lambda starts at 1e-5 in networks of up to 24 transformer blocks and at 1e-6
  in deeper ones, as in the authors' code. Up to 18 blocks, which that does not
  have, it starts at 0.1 (our choice).

  Attributes:
    factor: lambda, [L, D].
  """

  style = styles.Style("LayerScale", "#b58900", "^")
  certainty = styles.Certainty.CODE
  pre_norm = True

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    blocks = self.num_sublayers / 2
    start = 0.1 if blocks <= 18 else 1e-5 if blocks <= 24 else 1e-6
    shape = self.num_sublayers, config.width
    self.factor = tools.parameter("LD", start, *shape, decays=False)
