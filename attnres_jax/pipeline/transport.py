# SPDX-License-Identifier: Apache-2.0
"""Messages between the ranks of a pipeline, on a ring of `ppermute`s.

Going forward a message enters chunk c with the blocks of `Layout.window` (no
other block is ever sent) and, where a block is open, its running sum. Going
backward the gradients of the same vectors cross the same boundary the other
way, so a message backward is of the same size and dtypes.

All ranks send at once, with one program: what a link carries at a tick cannot
depend on the tick. So the i-th vector of a message crosses a link where any of
the chunks behind that link needs it (`Layout.link_vectors`), and is zero where
the chunk at hand does not. Under V = 1 that sends what is planned and nothing
else. A rank receives zeros for what does not cross its link.

Under V > 1 the exact minimum would take a loop whose body is a period of P V
ticks, each with permutes of its own: at any tick ranks are at different virtual
stages, so no shorter body knows who needs what. That is P times as many bodies
of chunks to compile. Nor can what is too much at one tick be sent at another: a
chunk starts in the tick after the one that made its last block.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnres_jax.pipeline import layout as layout_lib


class Message(NamedTuple):
  """What crosses a boundary for one microbatch, or a gradient of that.

  Attributes:
    blocks: block representations, the first of them the oldest of the window.
    partial: the running state that every boundary carries, a tree; None where
      no boundary does.
  """

  blocks: tuple[jax.Array, ...]
  partial: Any


@dataclasses.dataclass(frozen=True)
class Transport:
  """Who sends how much to whom at every tick.

  Attributes:
    layout: chunks and blocks.
    rule: which blocks are sent.
    axis: of the mesh, along which the ranks are.
    block: shape and dtype of a block representation; None without blocks.
    partial: shapes and dtypes of a running state; None without any.
  """

  layout: layout_lib.Layout
  rule: str
  axis: str
  block: Any
  partial: Any

  def message(
    self, blocks: Sequence[jax.Array] = (), partial: Any = None
  ) -> Message:
    """A message of the one size, filled up with zeros."""
    size = max(self.layout.link_vectors(self.rule))
    padding = [zeros(self.block)] * (size - len(blocks))
    if partial is None:
      partial = zeros(self.partial)
    return Message((*blocks, *padding), partial)

  def send(self, message: Message, *, backward: bool = False) -> Message:
    """Sends to the rank of the next chunk, or of the one before.

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
