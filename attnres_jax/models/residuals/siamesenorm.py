# SPDX-License-Identifier: Apache-2.0
"""SiameseNorm: a PostNorm and a PreNorm stream with shared sublayers."""

from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import styles
from attnres_jax.models.residuals import tools


class Streams(NamedTuple):
  """State and carry.

  Attributes:
    post_BTD: a, before its next norm.
    pre_BTD: b, the plain sum.
  """

  post_BTD: jax.Array
  pre_BTD: jax.Array


class SiameseNorm(base.Residual):
  """The released form, as in the authors' code.

    a <- PostNorm_l(a),   h_l = a + PreNorm_l(b),   y = f_l(h_l)
    a <- a + y / c_l,     b <- b + y,   c_l = sqrt(2 (t + 1))
    h_out = PostNorm_{L+1}(a) + PreNorm_{L+1}(b)

  Sublayer l belongs to transformer block t, counted from 0. Both streams start
  as the embedding. f_l has its own norm, and a final norm follows h_out. All
  gains start at one.

  Attributes:
    post_gain: of PostNorm, [L + 1, D].
    pre_gain: of PreNorm, [L + 1, D].
  """

  style = styles.Style("SiameseNorm", "#8e6bd1", "o")
  certainty = styles.Certainty.CODE

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.eps = config.norm_eps
    shape = self.num_sublayers + 1, config.width
    self.post_gain = tools.parameter("LD", 1, *shape)
    self.pre_gain = tools.parameter("LD", 1, *shape)

  def init(self, embedding_BTD: jax.Array) -> Streams:
    return Streams(*[self.widened(embedding_BTD)] * 2)

  def open(self, state: Streams, start: int, stop: int) -> tuple[Any, Any]:
    block_L = jnp.arange(start, stop) // 2
    weight_L = jax.lax.rsqrt(2.0 * (block_L + 1).astype(state.pre_BTD.dtype))
    gains = self.post_gain[start:stop], self.pre_gain[start:stop]
    return state, (*gains, weight_L)

  def input(self, carry: Streams, slot: Any) -> jax.Array:
    return self._sum(carry, slot[0], slot[1])

  def write(self, carry: Streams, slot: Any, y_BTD: jax.Array) -> Streams:
    post_gain_D, _, weight = slot
    y_BTD = precision.widen(y_BTD)
    post_BTD = tools.rms_norm(carry.post_BTD, post_gain_D, self.eps)
    return Streams(
      tools.save(post_BTD + weight * y_BTD), tools.save(carry.pre_BTD + y_BTD)
    )

  def readout(self, state: Streams) -> jax.Array:
    last = self.num_sublayers
    return self._sum(state, self.post_gain[last], self.pre_gain[last])

  def _sum(
    self, streams: Streams, post_gain_D: jax.Array, pre_gain_D: jax.Array
  ) -> jax.Array:
    post_BTD = tools.rms_norm(streams.post_BTD, post_gain_D, self.eps)
    pre_BTD = tools.rms_norm(streams.pre_BTD, pre_gain_D, self.eps)
    return (post_BTD + pre_BTD).astype(self.dtype)
