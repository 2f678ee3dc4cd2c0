# SPDX-License-Identifier: Apache-2.0
"""Dense connections: every read is a static map of all earlier outputs.

DenseNet (arXiv:1608.06993) has matrices, the table form of DenseFormer has
scalars. DenseFormer as published (arXiv:2402.02622) weighs the outputs of
transformer blocks, which have plain residuals inside.
"""

from collections.abc import Sequence
import functools
import operator
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models.residuals import over_blocks
from attnres_jax.models.residuals import styles
from attnres_jax.models.residuals import tools


class _Dense(tools.Values):
  """h_l = sum_i W_{i->l} v_i over i < l, for l = 1..L+1, the readout.

  Attributes:
    weight: W, [(L + 1)(L + 2) / 2, ...], rows l one after the other. No decay:
      it would silence the earlier outputs rather than restore the plain sum.
  """

  weight: nnx.Param

  def input(self, carry: Any, slot: Any) -> jax.Array:
    return self.readout(carry)

  def readout(self, state: tuple[jax.Array, ...]) -> jax.Array:
    """The read after so many values."""
    first = len(state) * (len(state) - 1) // 2
    return self.mix(state, self.weight[first : first + len(state)])

  def mix(self, values: Sequence[jax.Array], row: jax.Array) -> jax.Array:
    """The read [B, T, D], given its row of weights, one per value."""
    raise NotImplementedError

  def _num_weights(self) -> int:
    return (self.num_sublayers + 1) * (self.num_sublayers + 2) // 2


class DenseNet(_Dense):
  """h_l = P_l concat(v_0, ..., v_{l-1}), P_l [D, l D] (arXiv:1608.06993).

  The adaptation in the table of arXiv:2603.15031, with a readout of its own
  (our choice). Every D x D slice starts as the identity (our choice), so that
  the network starts as PreNorm.
  """

  style = styles.Style("DenseNet", "#4b0082", "P")
  certainty = styles.Certainty.PAPER

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    identity = jnp.eye(config.width, dtype=jnp.float32)
    weight = jnp.tile(identity, (self._num_weights(), 1, 1))
    self.weight = tools.parameter("LDD", weight, decays=False)

  def mix(self, values: Sequence[jax.Array], row: jax.Array) -> jax.Array:
    terms = [
      jnp.einsum(
        "BTD,DE->BTE", v_BTD, weight_DE.astype(v_BTD.dtype),
        preferred_element_type=precision.wide(self.dtype),
      )
      for v_BTD, weight_DE in zip(values, row, strict=True)
    ]  # fmt: skip
    return functools.reduce(operator.add, terms).astype(self.dtype)


class DenseFormer(_Dense):
  """h_l = sum_i a_{i->l} v_i with a free scalar for every pair.

  The form in which the table of arXiv:2603.15031 compares it. All scalars start
  at one (our choice), so that the network starts as PreNorm.
  """

  style = styles.Style("DenseFormer", "#6a5acd", "d")
  certainty = styles.Certainty.PAPER

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.weight = tools.parameter("L", 1, self._num_weights(), decays=False)

  def mix(self, values: Sequence[jax.Array], row: jax.Array) -> jax.Array:
    return over_blocks.weighted_sum(row, values).astype(self.dtype)


class Dwa(over_blocks.OverBlocks):
  """Depth-weighted averaging as in DenseFormer (arXiv:2402.02622, its code).

    X_0 = v_0,  X_t = Block_t(Y_{t-1}),  Y_t = sum_{j <= t} a_{t,j} X_j

  It starts as PreNorm: a_{t,t} = 1, all others 0. The authors' optimiser decays
  the scalars; ours does not, because decay would pull a_{t,t} away from the
  identity. Their options of a period and a dilation are not here.

  Attributes:
    weight: a, its rows t = 1, 2, ... one after the other.
  """

  style = styles.Style("DWA", "#6a5acd", "<", (0, (4, 2.5)))
  certainty = styles.Certainty.CODE

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    blocks = range(1, self.num_sublayers // 2 + 1)
    rows = [jnp.zeros(t + 1).at[t].set(1.0) for t in blocks]
    self.weight = tools.parameter("L", jnp.concatenate(rows), decays=False)

  def combine(self, outputs: tuple[jax.Array, ...]) -> jax.Array:
    t = len(outputs) - 1
    if t == 0:
      return super().combine(outputs)
    first = t * (t + 1) // 2 - 1
    row = self.weight[first : first + t + 1]
    return over_blocks.weighted_sum(row, outputs)
