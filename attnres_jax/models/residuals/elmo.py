# SPDX-License-Identifier: Apache-2.0
"""ELMo's readout: a learned mean of all states of the plain stream."""

from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import styles
from attnres_jax.models.residuals import tools


class StreamAndMean(NamedTuple):
  """State and carry.

  Attributes:
    stream_BTD: h_l, the plain sum.
    mean_BTD: the weighted sum of h_1, ..., h_{l-1}.
  """

  stream_BTD: jax.Array
  mean_BTD: jax.Array


class Elmo(base.Residual):
  """PreNorm whose head reads all states (arXiv:1802.05365).

    h_{l+1} = h_l + f_l(h_l),   h_out = sum_{j=1..L+1} softmax(s)_j h_j

  From the authors' code. Its factor gamma is left out, since the final norm
  removes it. s starts at zero: the mean of all states.

  Attributes:
    logits: s, [L + 1].
  """

  style = styles.Style("ELMo readout", "#7a8f99", "D")
  certainty = styles.Certainty.CODE

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    # No decay: it would pull the weights back to uniform.
    self.logits = tools.parameter("L", 0, self.num_sublayers + 1, decays=False)

  def init(self, embedding_BTD: jax.Array) -> StreamAndMean:
    stream_BTD = self.widened(embedding_BTD)
    return StreamAndMean(stream_BTD, jnp.zeros_like(stream_BTD))

  def open(self, state: Any, start: int, stop: int) -> tuple[Any, Any]:
    return state, self._weights()[start:stop]

  def input(self, carry: StreamAndMean, slot: Any) -> jax.Array:
    return carry.stream_BTD.astype(self.dtype)

  def write(
    self, carry: StreamAndMean, slot: Any, y_BTD: jax.Array
  ) -> StreamAndMean:
    return StreamAndMean(
      tools.save(carry.stream_BTD + precision.widen(y_BTD)),
      carry.mean_BTD + slot * carry.stream_BTD,
    )

  def readout(self, state: StreamAndMean) -> jax.Array:
    last_BTD = self._weights()[-1] * state.stream_BTD
    return (state.mean_BTD + last_BTD).astype(self.dtype)

  def _weights(self) -> jax.Array:
    return jax.nn.softmax(self.logits[...])
