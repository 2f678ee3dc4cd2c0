# SPDX-License-Identifier: Apache-2.0
"""Shared by schemes that act between transformer blocks.

Inside a block (two sublayers) runs a plain residual stream. Between blocks,

  X_0 = v_0,    X_t = Y_{t-1} + v_{2t-1} + v_{2t},    Y_t = combine(X_0..X_t),

and the readout is Y of the last block.
"""

from collections.abc import Sequence
import functools
import operator
from typing import Any

import jax

from attnres_jax.common import precision
from attnres_jax.models import linear
from attnres_jax.models.residuals import tools


class OverBlocks(tools.Blocks):
  """A scheme whose subclass defines `combine`.

  The state is the same as in Block AttnRes: X_0, ..., X_t in the model's dtype
  and, in the middle of a block, its float32 stream.
  """

  block_size = segment_size = 2

  def combine(self, outputs: tuple[jax.Array, ...]) -> jax.Array:
    """Y_t, float32, of (X_0, ..., X_t)."""
    return precision.widen(outputs[-1])

  def open(
    self, state: tools.BlockState, start: int, stop: int
  ) -> tuple[Any, Any]:
    if state.partial_BTD is not None:
      return state.partial_BTD, None
    return self.combine(state.blocks), None

  def input(self, carry: Any, slot: Any) -> jax.Array:
    return carry.astype(self.dtype)

  def write(self, carry: Any, slot: Any, y_BTD: jax.Array) -> Any:
    return tools.save(carry + precision.widen(y_BTD))

  def close(
    self, state: tools.BlockState, carry: Any, stop: int
  ) -> tools.BlockState:
    if stop % 2:
      return tools.BlockState(state.blocks, carry)
    return tools.BlockState((*state.blocks, carry.astype(self.dtype)), None)

  def readout(self, state: tools.BlockState) -> jax.Array:
    return self.combine(state.blocks).astype(self.dtype)


def weighted_sum(
  weights: Sequence[jax.Array] | jax.Array, values: Sequence[jax.Array]
) -> jax.Array:
  """sum_i w_i v_i in float32.

  A weight is a scalar, or of the shape of its value with axes of length one.
  """

  def total(weights, values):
    terms = [w * precision.widen(v) for w, v in zip(weights, values)]
    return functools.reduce(operator.add, terms)

  first = values[0]
  wide = jax.ShapeDtypeStruct(first.shape, precision.wide(first.dtype))
  return linear.counted(
    total, tuple(weights), tuple(values),
    flops=2 * len(values) * first.size, outs=wide,
  )  # fmt: skip
