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
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import block_attnres

BlockState = block_attnres.BlockState


class OverBlocks(base.Residual):
  """A scheme whose subclass defines `combine`.

  The state is the same as in Block AttnRes: X_0, ..., X_t in the model's dtype
  and, in the middle of a block, its float32 stream.
  """

  block_size = segment_size = 2

  def combine(self, outputs: tuple[jax.Array, ...]) -> jax.Array:
    """Y_t, float32, of (X_0, ..., X_t)."""
    return precision.widen(outputs[-1])

  def init(self, embedding_BTD: jax.Array) -> BlockState:
    return BlockState((embedding_BTD.astype(self.dtype),), None)

  def open(self, state: BlockState, start: int, stop: int) -> tuple[Any, Any]:
    del start, stop
    if state.partial_BTD is not None:
      return state.partial_BTD, None
    return self.combine(state.blocks), None

  def read(
    self, carry: Any, slot: Any, norm: base.Norm
  ) -> tuple[jax.Array | base.QKV, Any]:
    del slot
    return base.normed(carry.astype(self.dtype), norm), carry

  def write(self, carry: Any, slot: Any, y_BTD: jax.Array) -> Any:
    del slot
    return base.save(carry + precision.widen(y_BTD))

  def close(self, state: BlockState, carry: Any, stop: int) -> BlockState:
    if stop % 2:
      return BlockState(state.blocks, carry)
    return BlockState((*state.blocks, carry.astype(self.dtype)), None)

  def readout(self, state: BlockState) -> jax.Array:
    return self.combine(state.blocks).astype(self.dtype)

  def take_apart(self, state: BlockState) -> tuple[Any, Any]:
    return state

  def put_together(self, blocks: tuple[jax.Array, ...], rest: Any) -> Any:
    return BlockState(blocks, rest)


def weighted_sum(
  weights: Sequence[jax.Array] | jax.Array, values: Sequence[jax.Array]
) -> jax.Array:
  """sum_i w_i v_i in float32.

  Args:
    weights: float32, one for each value: a scalar, or of the shape of the value
      with axes of length one.
    values: in any float dtype.
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
