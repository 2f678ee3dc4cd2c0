# SPDX-License-Identifier: Apache-2.0
"""LAuReL, the learned augmented residual layer (arXiv:2411.07501).

The forms are from secondary summaries and from ports of one model that uses
them; the paper itself was not read. All three start as PreNorm.
"""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import prenorm

_REACH = 4  # Earlier inputs of LAuReL-PA; our choice.


class LaurelRW(prenorm.Stream):
  """Residual weights: two learned scalars per sublayer.

    h_{l+1} = alpha_l f_l(h_l) + beta_l h_l,   (alpha, beta) = 2 softmax(s_l)

  That a softmax bounds the scalars is recalled, not verified. The factor of 2
  is our choice: at the start, s = 0, both are 1.

  Attributes:
    logits: s, [L, 2].
  """

  style = base.Style("LAuReL-RW", "#5f9e3f", "o")
  certainty = base.Certainty.SUMMARY

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.logits = base.parameter("LM", 0, self.num_sublayers, 2)

  def write(self, carry: jax.Array, slot: Any, y_BTD: jax.Array) -> jax.Array:
    y_BTD = precision.widen(base.save(y_BTD))
    alpha, beta = 2 * jax.nn.softmax(slot.logits[...])
    return base.save(alpha * y_BTD + beta * carry)


class LaurelLR(prenorm.Stream):
  """Low rank: a learned map of the stream in addition to the identity.

    h_{l+1} = f_l(h_l) + h_l + B_l A_l h_l

  B starts at zero (recalled, not verified) and A at random, of fan-in size (our
  choice). Both products are in float32. The rank is `model.residual.rank`, 64
  unless set: that of the ports.

  Attributes:
    down: A, [L, D, R].
    up: B, [L, R, D].
  """

  style = base.Style("LAuReL-LR", "#5f9e3f", "s")
  takes = ("rank",)
  certainty = base.Certainty.SUMMARY

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    width, rank = config.width, config.residual.rank or 64
    shape = self.num_sublayers, width, rank
    start_LDR = jax.random.normal(rngs.params(), shape) * width**-0.5
    self.down = base.parameter("LDR", start_LDR)
    self.up = base.parameter("LRD", 0, shape[0], rank, width)

  def write(self, carry: jax.Array, slot: Any, y_BTD: jax.Array) -> jax.Array:
    mapped_BTD = slot.mapped(carry)
    return base.save(carry + mapped_BTD + precision.widen(y_BTD))

  def mapped(self, x_BTD: jax.Array) -> jax.Array:
    """B A x; `self` has the parameters of one sublayer."""
    low_BTR = jnp.einsum("BTD,DR->BTR", x_BTD, self.down[...])
    return jnp.einsum("BTR,RD->BTD", low_BTR, self.up[...])


class LaurelPA(LaurelLR):
  """Previous activations: the low-rank map of the last k inputs.

    h_{l+1} = f_l(h_l) + h_l + B_l A_l sum_{j=1..k} gamma_{l,j} h_{l-j}

  k is 4, and inputs before the first count as zero. The form is recalled, not
  verified. gamma starts at 1 / k (our choice), and B at zero.

  The state is a tuple of h_l, h_{l-1}, ..., h_{l-k}.

  Attributes:
    weight: gamma, [L, k].
  """

  style = base.Style("LAuReL-PA", "#5f9e3f", "^")
  certainty = base.Certainty.RECALLED

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    # No decay: at zero, B and gamma would get no gradient.
    shape = self.num_sublayers, _REACH
    self.weight = base.parameter("LM", 1 / _REACH, *shape, decays=False)

  def init(self, embedding_BTD: jax.Array) -> Any:
    now_BTD = super().init(embedding_BTD)
    return now_BTD, *[jnp.zeros_like(now_BTD)] * _REACH

  def input(self, carry: Any, slot: Any) -> jax.Array:
    return super().input(carry[0], slot)

  def write(self, carry: Any, slot: Any, y_BTD: jax.Array) -> Any:
    earlier_BTD: Any = sum(slot.weight[j] * h for j, h in enumerate(carry[1:]))
    next_BTD = carry[0] + slot.mapped(earlier_BTD) + precision.widen(y_BTD)
    return base.save(next_BTD), *carry[:-1]

  def readout(self, state: Any) -> jax.Array:
    return super().readout(state[0])
