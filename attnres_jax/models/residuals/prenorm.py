# SPDX-License-Identifier: Apache-2.0
"""Fixed residuals: the plain sum, and the running mean.

With a pre-norm, both are the same function of the same parameters (as eps goes
to 0), since RMSNorm removes the positive factor between them; see the
zero-query identity in `tests/models/zero_query_test.py`.
"""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import styles
from attnres_jax.models.residuals import tools

# Sublayers whose float32 sums are made again from the outputs, which take half
# as much in bfloat16, when checkpointing needs them. So many sums are in memory
# at once.
_SEGMENT = 8


class Stream(base.Residual):
  """One state [B, T, D], which sublayers read unchanged.

  Subclasses define `write`, whose slot is the scheme with the parameters of one
  sublayer.
  """

  def init(self, embedding_BTD: jax.Array) -> jax.Array:
    return self.widened(embedding_BTD)

  def open(self, state: Any, start: int, stop: int) -> tuple[Any, Any]:
    return state, self.rows(start, stop)

  def input(self, carry: jax.Array, slot: Any) -> jax.Array:
    return carry.astype(self.dtype)

  def readout(self, state: jax.Array) -> jax.Array:
    return state.astype(self.dtype)


class PreNorm(Stream):
  """h_{l+1} = h_l + f_l(h_l): the standard residual stream."""

  style = styles.Style("PreNorm", "#8b929c", "o")
  certainty = styles.Certainty.PAPER
  headline = True

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    if not config.scan_layers:
      self.segment_size = _SEGMENT

  def write(self, carry: jax.Array, slot: Any, y_BTD: jax.Array) -> jax.Array:
    if self.segment_size is None:  # A scan would make all sums at once.
      return tools.save(carry + precision.widen(y_BTD))
    return carry + precision.widen(tools.save(y_BTD))


class Rescaled(Stream):
  """h_{l+1} = l/(l+1) h_l + 1/(l+1) f_l(h_l): the mean of earlier values.

  Equals Full AttnRes with queries frozen at zero.
  """

  style = styles.Style("Rescaled", "#b5651d", "v", (0, (4, 2.5)))
  certainty = styles.Certainty.PAPER
  headline = True

  def open(self, state: jax.Array, start: int, stop: int) -> tuple[Any, Any]:
    # 1 / (l + 1) for l counted from 1.
    return state, 1.0 / jnp.arange(start + 2, stop + 2, dtype=state.dtype)

  def write(self, carry: jax.Array, slot: Any, y_BTD: jax.Array) -> jax.Array:
    return tools.save(carry + slot * (precision.widen(y_BTD) - carry))
