# SPDX-License-Identifier: Apache-2.0
"""Norms within the stream: PostNorm, DeepNorm, KEEL and HybridNorm.

All gains of norms start at one, and decay like the gains of pre-norms.
"""

from collections.abc import Mapping
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models import norm as norm_lib
from attnres_jax.models.residuals import prenorm
from attnres_jax.models.residuals import styles
from attnres_jax.models.residuals import tools


class PostNorm(prenorm.Stream):
  """A norm after each addition, and none in front of sublayers.

    h_{l+1} = Norm_l(alpha h_l + Core_l(h_l)),   alpha = 1

  The equation is from the table of arXiv:2603.15031. There is no final norm,
  since the last state is normalised.

  Attributes:
    alpha: weight of the stream.
    gain: of the norms, [L, D].
  """

  style = styles.Style("PostNorm", "#dc5a4b", "o")
  certainty = styles.Certainty.PAPER
  pre_norm = False
  final_norm = False

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.alpha, self.eps = 1.0, config.norm_eps
    self.gain = tools.parameter("LD", 1, self.num_sublayers, config.width)

  def write(self, carry: jax.Array, slot: Any, y_BTD: jax.Array) -> jax.Array:
    # The sum is what the backward pass of the norm needs.
    sum_BTD = tools.save(self.alpha * carry + precision.widen(y_BTD))
    return tools.rms_norm(sum_BTD, slot.gain[...], self.eps)


class DeepNorm(PostNorm):
  """PostNorm with a heavier stream and smaller outputs (arXiv:2203.00555).

    alpha = (2M)^(1/4),   beta = (8M)^(-1/4),   M transformer blocks

  The weights on the path from a sublayer's input to its output start at beta
  times their usual size: values and outputs of mixers, and MLPs. Constants and
  rule are from the table of arXiv:2603.15031 and public code. There the usual
  size is Xavier's; here it is `model.init_std`. That all three matrices of a
  SwiGLU are scaled is our choice.

  Attributes:
    beta: factor of the weights.
  """

  style = styles.Style("DeepNorm", "#dc5a4b", "s")
  certainty = styles.Certainty.CODE

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.alpha = self.num_sublayers**0.25
    self.beta = (4 * self.num_sublayers) ** -0.25

  def prepare(self, sublayers: Mapping[str, Any]) -> None:
    for kind, stack in sublayers.items():
      if not hasattr(stack.core, "scale_values"):
        config_lib.fail(
          "model.mixers",
          kind,
          "sublayers with `scale_values` for model.residual.name='deepnorm'",
        )
      stack.core.scale_values(self.beta)


class Keel(PostNorm):
  """PostNorm around pre-norm, with the stream weighted by depth.

    h_{l+1} = Norm_l(alpha h_l + f_l(h_l)),   alpha = L sublayers

  The equation is from the table of arXiv:2603.15031. Our choices: alpha, which
  summaries of arXiv:2601.19895 confirm; both norms have gains, the first
  sublayer is no exception, weights start as usual.
  """

  style = styles.Style("KEEL", "#dc5a4b", "^")
  certainty = styles.Certainty.PAPER
  pre_norm = True

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.alpha = float(self.num_sublayers)


class HybridNorm(prenorm.Stream):
  """PostNorm around MLPs, norms of q, k and v inside mixers (2503.04598).

    mixer   h_{l+1} = h_l + Core_l(h_l)            q, k and v are normalised
    MLP     h_{l+1} = n_l + Core_l(n_l),           n_l = Norm_l(h_l)

  From the authors' code. The norms of q, k and v are `model.qkv_norm`, which
  this scheme switches on. A sublayer with an odd index, from 0, is an MLP. The
  first transformer block is like the others, unlike in their HybridNorm*.

  Attributes:
    gain: of the norms, [L / 2, D].
  """

  style = styles.Style("HybridNorm", "#dc5a4b", "D")
  certainty = styles.Certainty.CODE
  pre_norm = False
  qkv_norm = True

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.eps = config.norm_eps
    self.gain = tools.parameter("LD", 1, self.num_sublayers // 2, config.width)

  def open(self, state: jax.Array, start: int, stop: int) -> tuple[Any, Any]:
    gain_LD = jnp.ones((self.num_sublayers, state.shape[-1]), state.dtype)
    gain_LD = gain_LD.at[1::2].set(self.gain[...])
    is_mlp_L = jnp.arange(start, stop) % 2 == 1
    return state, (is_mlp_L, gain_LD[start:stop])

  def input(self, carry: jax.Array, slot: Any) -> jax.Array:
    return self._stream(carry, slot).astype(self.dtype)

  def write(self, carry: jax.Array, slot: Any, y_BTD: jax.Array) -> jax.Array:
    return tools.save(self._stream(carry, slot) + precision.widen(y_BTD))

  def _stream(self, carry: jax.Array, slot: Any) -> jax.Array:
    is_mlp, gain_D = slot
    factor_BT1 = norm_lib.inverse_rms(carry, self.eps)
    factor_BT1 = jnp.where(is_mlp, factor_BT1, jnp.ones_like(factor_BT1))
    return carry * tools.coefficient(factor_BT1) * gain_D[None, None]
