# SPDX-License-Identifier: Apache-2.0
"""Messages between the ranks of a pipeline, on a ring of `ppermute`s.

In the forward pass, the message to chunk c has the blocks of `Layout.window`
(no other block is ever sent) and, if a block is open, its running sum. In the
backward pass, the gradients of the same vectors cross the same boundary in the
other direction, so a message has the same size and dtypes.

All ranks run one program and send at the same time, so the size of a message
cannot depend on the tick. The i-th vector of a message crosses a link if any of
the chunks behind that link needs it (`Layout.link_vectors`), and is zero if the
current chunk does not. With V = 1, this sends exactly what is planned. A rank
receives zeros for vectors that do not cross its link.

With V > 1, the exact minimum would take a loop whose body is a period of P V
ticks, each with its permutes. At any tick, ranks are at different virtual
stages, so no shorter body knows which rank needs what. That is P times as many
chunk bodies to compile. Transfers cannot be moved to another tick either: a
chunk starts in the tick after its last block was computed.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnres_jax.pipeline import layout as layout_lib


class Message(NamedTuple):
  """The vectors that cross a boundary for one microbatch, or their gradients.

  Attributes:
    blocks: block representations, the first of them the oldest of the window.
    partial: the running state that every boundary carries, a tree; None if
      boundaries carry none.
  """

  blocks: tuple[jax.Array, ...]
  partial: Any


@dataclasses.dataclass(frozen=True)
class Transport:
  """Sends messages between neighbouring ranks at every tick.

  `block` and `partial` have the shapes and dtypes of a block representation and
  of a running state; None if there are none.
  """

  layout: layout_lib.Layout
  rule: str
  axis: str
  block: Any
  partial: Any

  def message(
    self, blocks: Sequence[jax.Array] = (), partial: Any = None
  ) -> Message:
    """A message of fixed size, padded with zeros."""
    size = max(self.layout.link_vectors(self.rule))
    padding = [zeros(self.block)] * (size - len(blocks))
    if partial is None:
      partial = zeros(self.partial)
    return Message((*blocks, *padding), partial)

  def send(self, message: Message, *, backward: bool = False) -> Message:
    """Sends to the rank of the next chunk, or of the previous chunk.

    All ranks must call it at the same time.
    """

    def over(links: list[int], x: jax.Array) -> jax.Array:
      pairs = [((rank - 1) % self.layout.num_ranks, rank) for rank in links]
      if backward:
        pairs = [(receiver, sender) for sender, receiver in pairs]
      return jax.lax.ppermute(x, self.axis, pairs)

    counts = self.layout.link_vectors(self.rule)
    blocks = tuple(
      over([rank for rank, count in enumerate(counts) if count > i], x)
      for i, x in enumerate(message.blocks)
    )
    flags = self.layout.link_partials()
    links = [rank for rank, carries in enumerate(flags) if carries]
    partial = jax.tree.map(lambda x: over(links, x), message.partial)
    return Message(blocks, partial)


def zeros(like: Any) -> Any:
  """Zeros of these shapes and dtypes."""
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
