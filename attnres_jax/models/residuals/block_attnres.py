# SPDX-License-Identifier: Apache-2.0
"""Block AttnRes: depth attention over sums of S sublayers (Eq. 5-6).

The i-th sublayer of block n mixes b_0 (the embedding), the completed blocks
b_1..b_{n-1} and, for i >= 2, the partial sum b_n^{i-1} of its own block; the
readout mixes b_0..b_N with its own query. In two phases (Alg. 1): all queries
of a block attend to the completed blocks together, then each sublayer merges
the partial sum as one more source.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax import precision
from attnres_jax.models import norm as norm_lib
from attnres_jax.models import stacks
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import depth_attention
from attnres_jax.models.residuals import depth_operators
from attnres_jax.models.residuals import depth_reads
import attnres_kernels


class BlockState(NamedTuple):
  """State between two sublayers.

  Attributes:
    blocks: b_0, b_1, ..., completed block representations, separate arrays in
      the model's dtype.
    partial_BTD: float32 sum of the open block's outputs; None at a boundary.
  """

  blocks: tuple[jax.Array, ...]
  partial_BTD: jax.Array | None


class BlockAttnResOneSoftmax(depth_attention.DepthAttention):
  """The definition: one softmax over blocks and partial sum per sublayer."""

  style = base.Style("Block AttnRes", "#2f86d6", "s")
  certainty = base.Certainty.PAPER
  headline = True
  can_sum = True
  block_size: int  # pyrefly: ignore[bad-override-mutable-attribute]

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    self.block_size = config.residual.sublayers_per_block(config.num_sublayers)
    super().__init__(config, rngs=rngs)

  def segments(self) -> tuple[tuple[int, int], ...]:
    size, last = self.block_size, self.num_sublayers
    return tuple((i, min(i + size, last)) for i in range(0, last, size))

  def init(self, embedding_BTD: jax.Array) -> BlockState:
    return BlockState((embedding_BTD.astype(self.dtype),), None)

  def open(self, state: BlockState, start: int, stop: int) -> tuple[Any, Any]:
    return state, self.queries.reads(start, stop)

  def read(self, carry: Any, slot: Any) -> jax.Array | base.QKV:
    sources = carry.blocks
    if carry.partial_BTD is not None:
      sources = (*sources, carry.partial_BTD.astype(self.dtype))
    return self.attend(slot, sources)

  def write(self, carry: Any, slot: Any, y_BTD: jax.Array) -> Any:
    del slot
    return carry._replace(partial_BTD=_add(carry.partial_BTD, y_BTD))

  def close(self, state: BlockState, carry: Any, stop: int) -> BlockState:
    return self._commit(carry.blocks, carry.partial_BTD, stop)

  def readout(self, state: BlockState) -> jax.Array:
    return self.attend_last(state.blocks)

  def take_apart(self, state: BlockState) -> tuple[Any, Any]:
    return state

  def put_together(self, blocks: tuple[jax.Array, ...], rest: Any) -> Any:
    return BlockState(blocks, rest)

  def running_state(self, trace: base.Trace) -> tuple[jax.Array, ...]:
    states, partial = [], None
    for l, y_BTD in enumerate(trace.values[1:]):
      partial = _add(None if l % self.block_size == 0 else partial, y_BTD)
      states.append(partial)
    return tuple(states)

  def depth_weights(self, values: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    state = self.init(values[0])
    weights = []
    for l in range(self.num_sublayers + 1):
      sources = state.blocks
      if state.partial_BTD is not None:
        sources = (*sources, state.partial_BTD)
      weights.append(self.mean_weights(self.queries.single(l), sources))
      if l < self.num_sublayers:
        partial = _add(state.partial_BTD, values[l + 1])
        state = self._commit(state.blocks, partial, l + 1)
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

  def _commit(
    self, blocks: tuple[jax.Array, ...], partial: jax.Array, stop: int
  ) -> BlockState:
    if stop % self.block_size and stop != self.num_sublayers:
      return BlockState(blocks, partial)
    return BlockState((*blocks, partial.astype(self.dtype)), None)


class _Normed(NamedTuple):
  """The carry before a sublayer whose mixture is normalised already."""


class _Lying(NamedTuple):
  """A partial sum in a loop over depth.

  Attributes:
    partial_BTD: the sum, in the model's dtype.
    row: where it lies, if it is a row of an array.
  """

  partial_BTD: jax.Array
  row: attnres_kernels.Row | None


class BlockAttnRes(BlockAttnResOneSoftmax):
  """The same function in two phases; the carry is only the partial sum.

  It is None, or `_Normed`, before the first sublayer of a block. A scan cannot
  change it to an array: then it is zeros, and the slot says that they have no
  weight.
  """

  definition = BlockAttnResOneSoftmax
  scannable = True
  banked = sums_open = True

  def open(self, state: BlockState, start: int, stop: int) -> tuple[Any, Any]:
    reads = self.queries.reads(start, stop)
    slots = self.phase_1(reads, state.blocks)
    if state.partial_BTD is not None:
      return state.partial_BTD, slots
    if self._apart:
      # No scan, so the first sublayer may read without a partial sum.
      return None, slots
    one = state.blocks[0]
    partial_BTD = jnp.zeros(one.shape, precision.wide(one.dtype))
    return partial_BTD, slots.ignoring_first()

  def open_normed(
    self, state: BlockState, start: int, stop: int, norm: Any
  ) -> tuple[Any, Any]:
    reads = self.queries.reads(start, stop)
    # Otherwise, the first mixture is merged with the partial sum or changed.
    alone = self._apart and state.partial_BTD is None and self.can_norm(reads)
    if not alone or isinstance(norm, norm_lib.Identity):
      return self.open(state, start, stop)
    return _Normed(), self.phase_1(reads, state.blocks, norm)

  def num_sources(self, l: int) -> int:
    return 1 + l // self.block_size

  def open_rows(
    self, rest: Any, shape: tuple[int, ...], size: int
  ) -> jax.Array:
    del size
    if rest is None:
      return jnp.zeros((1, *shape), precision.wide(self.dtype))
    return rest[None]

  def step(
    self,
    reads: depth_reads.Read,
    mixtures: tuple[jax.Array, jax.Array],
    open_RBTD: jax.Array,
    place: jax.Array | int,
    first: jax.Array | bool,
    sublayer: Callable[[tuple[Any, Any]], jax.Array],
    rows: depth_operators.Rows,
    norm: norm_lib.RMSNorm,
    sinks: attnres_kernels.Sinks | None,
  ) -> tuple[jax.Array, attnres_kernels.Sinks | None]:
    del place
    slot = self.slots_of(reads, *mixtures).ignoring_first(first)
    open_BTD, slot = stacks.only((open_RBTD, slot))
    # A mixture with a null source lies nowhere yet.
    if rows[0] is not None and reads.null_D is None:
      slot = slot.lying(rows[0])
    if sinks is None:
      return sublayer((_Lying(open_BTD, rows[1]), slot)), None
    sinks, normed_BTD = self.merge_into(slot, open_BTD, norm, rows[1], sinks)
    return sublayer((_Normed(), slot._replace(out_BTD=normed_BTD))), sinks

  def read(self, carry: Any, slot: Any) -> jax.Array | base.QKV:
    if carry is None:
      return depth_reads.each(slot, self.whole)
    return self.merge(slot, carry.astype(self.dtype))

  def read_normed(
    self, carry: Any, slot: Any, norm: norm_lib.RMSNorm
  ) -> jax.Array | base.QKV:
    if isinstance(carry, _Normed):
      return slot.out_BTD
    if carry is None:
      return depth_reads.normed(self.read(carry, slot), norm)
    if isinstance(carry, _Lying):
      return self.merge_normed(slot, carry.partial_BTD, norm, carry.row)
    return self.merge_normed(slot, carry.astype(self.dtype), norm)

  def read_and_carry_on(
    self, carry: Any, slot: Any, norm: norm_lib.RMSNorm
  ) -> tuple[jax.Array | base.QKV, Any]:
    # In a scan, the gradient of the sum is an array of its own in any case.
    plain = self._apart and slot.value is None and slot.scale is None
    if not plain or not isinstance(carry, jax.Array):
      return super().read_and_carry_on(carry, slot, norm)
    carry, normed_BTD = self.merge_and_carry_on(slot, carry, norm)
    return normed_BTD, carry

  def write(self, carry: Any, slot: Any, y_BTD: jax.Array) -> Any:
    del slot
    return _add(None if isinstance(carry, _Normed) else carry, y_BTD)

  def close(self, state: BlockState, carry: Any, stop: int) -> BlockState:
    return self._commit(state.blocks, carry, stop)

  def for_few_tokens(self) -> base.Residual:
    return depth_attention.sharing(self, BlockAttnResOfFewTokens)


class BlockAttnResOfFewTokens(
  depth_attention.OfFewTokens, BlockAttnResOneSoftmax
):
  """The same function, with a read and its norm in one operation.

  For a single token, the partial sum stays a tuple of outputs, which the read
  adds up. For several, the product that computes an output adds it; with one
  row, compilers for TPUs do not, and two more operations per sublayer would
  take longer than the read.
  """

  definition = BlockAttnResOneSoftmax

  def sources(self, state: BlockState) -> tuple[Any, ...]:
    partial = () if state.partial_BTD is None else (state.partial_BTD,)
    return (*state.blocks, *partial)

  def read(self, carry: Any, slot: Any) -> jax.Array | base.QKV:
    state, l = carry
    return super().read((_summed(state), l), slot)

  def write(self, carry: Any, slot: Any, y_BTD: jax.Array) -> Any:
    batch, length, _ = y_BTD.shape
    if batch * length > 1:
      return super().write(carry, slot, y_BTD)
    state, l = carry
    terms = (*(state.partial_BTD or ()), y_BTD)
    return state._replace(partial_BTD=terms), l + 1

  def close(self, state: Any, carry: Any, stop: int) -> Any:
    state_after, l = carry
    return super().close(state, (_summed(state_after), l), stop)


def _summed(state: BlockState) -> BlockState:
  """With one array for the partial sum."""
  terms: Any = state.partial_BTD
  if not isinstance(terms, tuple):
    return state
  total = functools.reduce(jnp.add, map(precision.widen, terms))
  return state._replace(partial_BTD=total)


def _add(partial_BTD: jax.Array | None, y_BTD: jax.Array) -> jax.Array:
  y_BTD = precision.widen(y_BTD)
  return base.keep(y_BTD if partial_BTD is None else partial_BTD + y_BTD)
