# SPDX-License-Identifier: Apache-2.0
"""Block AttnRes: depth attention over sums of S sublayers (Eq. 5-6).

The i-th sublayer of block n mixes b_0 (the embedding), the completed blocks
b_1..b_{n-1} and, for i >= 2, the partial sum b_n^{i-1} of its own block; the
readout mixes b_0..b_N with its own query. In two phases (Alg. 1), all queries
of a block attend to the completed blocks together, then each sublayer merges
the partial sum as one more source. The other form, one softmax per read, is the
definition (`depth_read`).
"""

from collections.abc import Sequence
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import definition
from attnres_jax.models.residuals import depth_read
from attnres_jax.models.residuals import styles
from attnres_jax.models.residuals import tools


class BlockAttnRes(tools.Blocks, depth_read.DepthAttention):
  """Block AttnRes in either form.

  The carry is the partial sum, and the blocks if the reader needs them again.
  Before the first sublayer of a block, the sum is None. A scan cannot change it
  to an array: then it is zeros, and the slot says that they have no weight.
  """

  style = styles.Style("Block AttnRes", "#2f86d6", "s")
  certainty = styles.Certainty.PAPER
  headline = True
  has_blocks = True
  block_size: int  # pyrefly: ignore[bad-override-mutable-attribute]

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    size = config.residual.sublayers_per_block(config.num_sublayers)
    self.block_size = self.segment_size = size
    super().__init__(config, rngs=rngs)
    self.scannable = self.scans_blocks = self.two_phase
    self._scans_layers = config.scan_layers

  def open(
    self, state: tools.BlockState, start: int, stop: int
  ) -> tuple[Any, Any]:
    reads, partial_BTD = self.queries.reads(start, stop), state.partial_BTD
    carry, slots = self.open_by(self.reader, reads, state.blocks)
    if partial_BTD is None and self._scans_layers and self.two_phase:
      first = state.blocks[0]
      partial_BTD = jnp.zeros(first.shape, precision.wide(first.dtype))
      slots = slots.without_open_source()
    return carry._replace(partial_BTD=partial_BTD), slots

  def open_by(
    self, reader: definition.OneSoftmax, reads: definition.Read, blocks: Any
  ) -> tuple[tools.BlockState, Any]:
    """`open` of a new block, of given reads, sources and form of these."""
    again, slots = reader.open(reads, blocks)
    return tools.BlockState(again, None), slots

  def read(
    self, carry: Any, slot: Any, norm: base.Norm
  ) -> tuple[jax.Array | base.QKV, Any]:
    opened = self._opened(carry)
    return self.reader.read(slot, carry.blocks, opened, norm), carry

  def write(self, carry: Any, slot: Any, y_BTD: jax.Array) -> Any:
    return carry._replace(partial_BTD=_add(carry.partial_BTD, y_BTD))

  def close(
    self, state: tools.BlockState, carry: Any, stop: int
  ) -> tools.BlockState:
    partial_BTD = carry.partial_BTD
    if stop % self.block_size and stop != self.num_sublayers:
      return tools.BlockState(state.blocks, partial_BTD)
    return tools.BlockState(
      (*state.blocks, partial_BTD.astype(self.dtype)), None
    )

  def readout(self, state: tools.BlockState) -> jax.Array:
    return self.attend_last(state.blocks)

  def running_state(self, trace: base.Trace) -> tuple[jax.Array, ...]:
    states, partial_BTD = [], None
    for l, y_BTD in enumerate(trace.values[1:]):
      partial_BTD = _add(partial_BTD if l % self.block_size else None, y_BTD)
      states.append(partial_BTD)
    return tuple(states)

  def depth_weights(self, values: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    state, weights = self.init(values[0]), []
    for l in range(self.num_sublayers + 1):
      sources = (*state.blocks, *self._opened(state))
      weights.append(self.mean_weights(l, sources))
      if l < self.num_sublayers:
        state = self.close(state, self.write(state, None, values[l + 1]), l + 1)
    return tuple(weights)

  def source_labels(self) -> tuple[tuple[str, ...], ...]:
    labels = []
    for l in range(self.num_sublayers + 1):
      done, inside = divmod(l, self.block_size)
      if l == self.num_sublayers and inside:
        done, inside = done + 1, 0
      names = ["embedding"] + [f"block {n + 1}" for n in range(done)]
      labels.append(tuple(names + ["partial"] * (inside > 0)))
    return tuple(labels)

  def _opened(self, state: tools.BlockState) -> tuple[jax.Array, ...]:
    if state.partial_BTD is None:
      return ()
    return (tools.narrowed(state.partial_BTD, self.dtype),)


def _add(partial_BTD: jax.Array | None, y_BTD: jax.Array) -> jax.Array:
  # In its own dtype it takes half of what the sum would, which comes back in a
  # few additions, since a segment is one block.
  y_BTD = precision.widen(tools.save(y_BTD))
  return y_BTD if partial_BTD is None else partial_BTD + y_BTD
