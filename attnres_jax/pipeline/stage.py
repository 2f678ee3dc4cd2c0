# SPDX-License-Identifier: Apache-2.0
"""One chunk of the network on its rank: forward, and backward by recomputation.

For each microbatch in flight, a rank keeps the block representations that it
received or computed and still needs, each once for all of its chunks, and the
running state that entered each chunk. The backward pass recomputes the chunk
from these under `jax.vjp`. So nothing that autodiff saves outlives the backward
of a chunk, and only slots of pools, assigned by the schedule, persist between
ticks.

Gradients of blocks are summed in float32 on every rank. When the backward of
the chunk that received a block is done, every later use has been
differentiated, and the sum is sent to where the block came from. This is the
transpose of the forward plan.

Token table and head are in no chunk. The first chunk looks up its tokens and
returns the gradient of their vectors; the last chunk returns its states after
the final norm. What becomes of the two is the business of `spmd`, in which all
ranks share the work of the head.

Every chunk is a separate function, traced for its own sublayers, sources and
position: kinds of sublayers, sizes and block boundaries may differ between
chunks without masked work. The price is a program with a body per chunk instead
of per rank. With `model.depth_loop="scan"`, a chunk runs blocks that repeat
kinds of sublayers as one loop, so that its body does not grow with depth. Rows
of weights are padded to the largest number of sublayers of a kind in any chunk.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.common import scopes
from attnres_jax.models import loss as loss_lib
from attnres_jax.models import trunk
from attnres_jax.pipeline import layout as layout_lib
from attnres_jax.pipeline import memory
from attnres_jax.pipeline import placement
from attnres_jax.pipeline import transport as transport_lib

Message = transport_lib.Message
Shared = placement.Shared


class Cache(NamedTuple):
  """The results of forward that a rank keeps, by slot.

  Attributes:
    blocks: [slots, B, T, D], or None without blocks.
    inputs: tree of [slots, ...], running states that entered chunks, or None.
  """

  blocks: Any
  inputs: Any


class Gradients(NamedTuple):
  """The sums of backward on a rank, except for the weights of sublayers.

  Attributes:
    blocks: float32 [slots, B, T, D], gradients of blocks that wait, or None.
    shared: gradients of residual scheme and final norm.
  """

  blocks: Any
  shared: Shared


@dataclasses.dataclass(frozen=True)
class Network:
  """The chunks of a network as functions."""

  config: config_lib.RunConfig
  layout: layout_lib.Layout

  def kinds(self, chunk: int) -> tuple[str, ...]:
    """The kinds of the sublayers of a chunk."""
    end = self.layout.ends[chunk]
    start = self.layout.ends[chunk - 1] if chunk else 0
    return self.config.model.sublayer_kinds[start:end]

  def no_loss(self) -> loss_lib.LossSums:
    """The loss of no microbatch."""
    return loss_lib.no_loss(precision.wide(self.config.model.dtype))

  def no_states(self, microbatch: loss_lib.Examples) -> jax.Array:
    """Zeros [B, T, D] in the dtype of embedding and final states."""
    shape = *microbatch.inputs.shape, self.config.model.width
    return jnp.zeros(shape, self.config.model.dtype)

  def run(
    self,
    chunk: int,
    sublayers: trunk.Sublayers,
    shared: Shared,
    blocks: tuple[jax.Array, ...],
    partial: Any,
    microbatch: loss_lib.Examples,
  ) -> Any:
    """Runs a chunk.

    Args:
      chunk: its number.
      sublayers: the chunk's sublayers, in the order of depth.
      shared: the other parameters, of which the embedding is not used.
      blocks: the blocks that it reads, b_0 first; none for the first chunk.
      partial: the rest of the state; None if the boundary carries none. For the
        first chunk, the embedding.
      microbatch: tokens.

    Returns:
      The blocks that it computed, and the rest of the state. For the last
      chunk, states [B, T, D] after the final norm.
    """
    residual = shared.residual
    if chunk == 0:
      with scopes.part(scopes.RESIDUAL):
        state = residual.init(partial)
    else:
      state = residual.put_together(blocks, partial)
    start = self.layout.ends[chunk - 1] if chunk else 0
    part = trunk.Trunk.of(
      self.config.model, residual, kinds=self.kinds(chunk), start=start,
      value_residual=False,
    )  # fmt: skip
    state = part.run_part(sublayers, state, microbatch.segment_ids)
    if chunk < self.layout.num_chunks - 1:
      after, partial = residual.take_apart(state)
      return tuple(after[len(blocks) :]), partial
    with scopes.part(scopes.RESIDUAL):
      h_BTD = residual.readout(state)
    with scopes.part(scopes.NORM):
      return shared.final_norm(h_BTD)


class Work(NamedTuple):
  """The inputs of a unit of work besides the message that arrives.

  Attributes:
    weights: kind -> module of leaves [V, rows, ...] of all chunks of the rank,
      or [1, rows, ...] of this chunk.
    shared: the other parameters.
    microbatch: tokens.
    index: int32, of the microbatch.
  """

  weights: dict[str, Any]
  shared: Shared
  microbatch: loss_lib.Examples
  index: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
  """Runs the units of work of a rank, each a chunk of a microbatch.

  Pools have the slots of cached blocks, of running states that entered chunks
  and of gradients of blocks.
  """

  network: Network
  transport: transport_lib.Transport
  blocks: memory.SlotPool
  inputs: memory.SlotPool
  gradients: memory.SlotPool

  def empty_cache(self) -> Cache:
    wire = self.transport
    return Cache(
      _pool(self.blocks, wire.block), _pool(self.inputs, wire.partial)
    )

  def no_gradients(self, shared: Shared) -> Gradients:
    block = self.transport.block
    if block is not None:
      block = jax.ShapeDtypeStruct(block.shape, precision.wide(block.dtype))
    return Gradients(_pool(self.gradients, block), zeros_like(_inner(shared)))

  def receive(
    self, chunk: int, cache: Cache, message: Message, work: Work
  ) -> Cache:
    """The cache, updated with the message that arrived for a chunk."""
    blocks, inputs = cache
    slots = self._slots(self.blocks, chunk, work)
    window = self.transport.layout.window(chunk, self.transport.rule)
    for block, x_BTD in zip(window, message.blocks):
      blocks = blocks.at[slots[block]].set(x_BTD)
    if self.transport.layout.has_partial(chunk):
      slot = self._slots(self.inputs, chunk, work)
      inputs = jax.tree.map(
        lambda pool, x: pool.at[slot].set(x), inputs, message.partial
      )
    return Cache(blocks, inputs)

  def forward(
    self, chunk: int, cache: Cache, message: Message, work: Work
  ) -> tuple[Cache, Message, jax.Array]:
    """Runs a chunk on the message that has arrived.

    Returns:
      The cache, the message to the rank of the next chunk, and the final states
      [B, T, D] (zero before the last chunk).
    """
    layout, wire = self.transport.layout, self.transport
    cache = self.receive(chunk, cache, message, work)
    blocks, partial = self._inputs(chunk, cache, work)
    sublayers = self._layers(chunk, work.weights)
    result = self.network.run(
      chunk, sublayers, work.shared, blocks, partial, work.microbatch
    )
    if chunk == layout.num_chunks - 1:
      return cache, wire.message(), result
    made, partial = result
    slots, pool = self.blocks.slots[chunk], cache.blocks
    where = self._slots(self.blocks, chunk, work)
    for block, x_BTD in zip(layout.produced(chunk), made, strict=True):
      if slots[0, block] >= 0:
        pool = pool.at[where[block]].set(x_BTD)
    complete = (*blocks, *made)
    window = [complete[block] for block in layout.window(chunk + 1, wire.rule)]
    message = wire.message(window, partial)
    nothing_BTD = self.network.no_states(work.microbatch)
    return cache._replace(blocks=pool), message, nothing_BTD

  def backward(
    self,
    chunk: int,
    cache: Cache,
    gradients: Gradients,
    weights: dict[str, Any],
    message: Message,
    d_final_BTD: jax.Array,
    work: Work,
  ) -> tuple[Gradients, dict[str, Any], Message, jax.Array]:
    """Recomputes a chunk and differentiates it.

    Args:
      chunk: its number.
      cache: of the rank.
      gradients: sums so far.
      weights: sums of the gradients of `Work.weights`.
      message: gradients of the message that this unit sent.
      d_final_BTD: gradient of the final states, for the last chunk.
      work: of this unit.

    Returns:
      Both sums; gradients of the message that this unit received; and the
      gradient [B, T, D] of the embedding (zero after the first chunk).
    """
    layout, wire = self.transport.layout, self.transport
    blocks, partial = self._inputs(chunk, cache, work)
    sublayers = self._layers(chunk, work.weights)
    last = chunk == layout.num_chunks - 1

    def run(sublayers, shared, blocks, partial):
      return self.network.run(
        chunk, sublayers, shared, blocks, partial, work.microbatch
      )

    shared = _inner(work.shared)
    _, pull_back = jax.vjp(run, sublayers, shared, blocks, partial)
    where = self._slots(self.gradients, chunk, work)
    waiting = {
      block: [gradients.blocks[where[block]]]
      for block in layout.held(chunk, wire.rule)
    }
    for block, x_BTD in zip(
      layout.window(chunk + 1, wire.rule), message.blocks
    ):
      waiting.setdefault(block, []).append(precision.widen(x_BTD))
    if last:
      cotangent = d_final_BTD
    else:
      made = [_sum(waiting.pop(b)) for b in layout.produced(chunk)]
      carries = layout.has_partial(chunk + 1)
      cotangent = (
        tuple(x_BTD.astype(wire.block.dtype) for x_BTD in made),
        message.partial if carries else None,
      )
    d_sublayers, d_shared, d_blocks, d_partial = pull_back(cotangent)
    for block, x_BTD in enumerate(d_blocks):
      waiting.setdefault(block, []).append(precision.widen(x_BTD))

    sent = []
    for block in layout.window(chunk, wire.rule):
      sent.append(_sum(waiting.pop(block)).astype(wire.block.dtype))
    pool = gradients.blocks
    for block, terms in waiting.items():
      pool = pool.at[where[block]].set(_sum(terms))
    # The compiler drops zeros of what a chunk does not use.
    shared = jax.tree.map(jnp.add, gradients.shared, d_shared)
    weights = weights | {
      kind: jax.tree.map(
        functools.partial(self._add, chunk), weights[kind], gradient
      )
      for kind, gradient in d_sublayers.items()
    }
    if chunk == 0:
      message, d_embedding_BTD = wire.message(sent), d_partial
    else:
      message = wire.message(sent, d_partial)
      d_embedding_BTD = self.network.no_states(work.microbatch)
    return Gradients(pool, shared), weights, message, d_embedding_BTD

  def _inputs(
    self, chunk: int, cache: Cache, work: Work
  ) -> tuple[tuple[jax.Array, ...], Any]:
    layout = self.transport.layout
    if chunk == 0:
      return (), work.shared.embedding.encode(work.microbatch.inputs)
    where = self._slots(self.blocks, chunk, work)
    blocks = tuple(cache.blocks[where[b]] for b in layout.reads(chunk))
    if not layout.has_partial(chunk):
      return blocks, None
    slot = self._slots(self.inputs, chunk, work)
    return blocks, jax.tree.map(lambda pool: pool[slot], cache.inputs)

  def _slots(self, pool: memory.SlotPool, chunk: int, work: Work) -> jax.Array:
    return jnp.asarray(pool.slots[chunk])[work.index]

  def _place(self, chunk: int, weights: jax.Array) -> int:
    """The index of a chunk in a leaf [V, rows, ...] or [1, rows, ...]."""
    if weights.shape[0] == 1:
      return 0
    return self.transport.layout.virtual_stage(chunk)

  def _add(self, chunk: int, total: jax.Array, more: jax.Array) -> jax.Array:
    place = self._place(chunk, total)
    return total.at[place, : more.shape[0]].add(more)

  def _layers(self, chunk: int, weights: Mapping[str, Any]) -> trunk.Sublayers:
    """The sublayers of a chunk, from `Work.weights`.

    In the dtype of master weights, like their gradients; matrix products cast
    them, possibly back to the dtype in which they arrived.
    """

    def of_chunk(count: int, w: jax.Array) -> jax.Array:
      return precision.widen(w[self._place(chunk, w), :count])

    return {
      kind: jax.tree.map(functools.partial(of_chunk, count), weights[kind])
      for kind, count in collections.Counter(self.network.kinds(chunk)).items()
    }


def _inner(shared: Shared) -> Shared:
  """The parameters that chunks use beside sublayers."""
  return shared._replace(embedding=None)


def zeros_like(weights: Any) -> Any:
  """Zeros in the dtype of master weights, whatever the dtype of `weights`."""
  return jax.tree.map(
    lambda w: jnp.zeros(w.shape, precision.wide(w.dtype)), weights
  )


def _sum(terms: Sequence[jax.Array]) -> jax.Array:
  return functools.reduce(jnp.add, terms)


def _pool(pool: memory.SlotPool, like: Any) -> Any:
  return jax.tree.map(lambda x: jnp.zeros((pool.size, *x.shape), x.dtype), like)
