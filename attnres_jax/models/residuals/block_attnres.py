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
from attnres_jax.models.residuals import depth_read
from attnres_jax.models.residuals import styles


class BlockAttnRes(base.Blocks, depth_read.DepthAttention):
  """Block AttnRes in either form.

  In two phases, the carry is only the partial sum. It is None before the first
  sublayer of a block. A scan cannot change it to an array: then it is zeros,
  and the slot says that they have no weight. With one softmax per read, the
  carry is the state.
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
    self, state: base.BlockState, start: int, stop: int
  ) -> tuple[Any, Any]:
    reads = self.queries.reads(start, stop)
    if not self.two_phase:
      return state, reads
    slots = self.phase_1(reads, state.blocks)
    if state.partial_BTD is not None or not self._scans_layers:
      return state.partial_BTD, slots
    first = state.blocks[0]
    partial_BTD = jnp.zeros(first.shape, precision.wide(first.dtype))
    return partial_BTD, slots.without_open_source()

  def read(
    self, carry: Any, slot: Any, norm: base.Norm
  ) -> tuple[jax.Array | base.QKV, Any]:
    if isinstance(carry, base.BlockState):
      return base.normed(self.attend(slot, self._sources(carry)), norm), carry
    if carry is None:
      h = depth_read.each(slot, depth_read.mixture_of)
      return depth_read.normed(h, norm), carry
    return self.merge(slot, carry.astype(self.dtype), norm), carry

  def write(self, carry: Any, slot: Any, y_BTD: jax.Array) -> Any:
    if isinstance(carry, base.BlockState):
      return carry._replace(partial_BTD=_add(carry.partial_BTD, y_BTD))
    return _add(carry, y_BTD)

  def close(
    self, state: base.BlockState, carry: Any, stop: int
  ) -> base.BlockState:
    partial_BTD = carry
    if isinstance(carry, base.BlockState):
      partial_BTD = carry.partial_BTD
    if stop % self.block_size and stop != self.num_sublayers:
      return base.BlockState(state.blocks, partial_BTD)
    return base.BlockState(
      (*state.blocks, partial_BTD.astype(self.dtype)), None
    )

  def readout(self, state: base.BlockState) -> jax.Array:
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
      read = self.queries.single(l)
      weights.append(self.mean_weights(read, self._sources(state)))
      if l < self.num_sublayers:
        partial_BTD = _add(state.partial_BTD, values[l + 1])
        state = self.close(state, partial_BTD, l + 1)
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

  def _sources(self, state: base.BlockState) -> tuple[jax.Array, ...]:
    if state.partial_BTD is None:
      return state.blocks
    return (*state.blocks, state.partial_BTD.astype(self.dtype))


def _add(partial_BTD: jax.Array | None, y_BTD: jax.Array) -> jax.Array:
  y_BTD = precision.widen(y_BTD)
  return base.save(y_BTD if partial_BTD is None else partial_BTD + y_BTD)
