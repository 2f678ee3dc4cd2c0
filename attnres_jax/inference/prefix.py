# SPDX-License-Identifier: Apache-2.0
"""What prompts have in common is computed once.

A trie whose edges are chunks of C tokens. A node has what `Tokens` caches keep
of its chunk, and the recurrent states after it, if the network has any. Those
cannot be cut: a prompt resumes at the deepest node of its path that has a
state, even if the tokens of deeper ones are known.

Arrays stay on the device. Beyond `most_bytes`, what was not used for longest is
dropped: a node without children, or the state of another one.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import itertools
from typing import Any

import jax


@dataclasses.dataclass
class Node:
  """One chunk of tokens, after its parents' chunks.

  Attributes:
    tokens: entries of the chunk.
    state: recurrent states after it; None if they were dropped.
    used: when it was used last; more is later.
    children: by their chunks.
  """

  tokens: Any = None
  state: Any = None
  used: int = 0
  children: dict[tuple[int, ...], "Node"] = dataclasses.field(
    default_factory=dict
  )


class Trie:
  """Chunks of earlier prompts.

  Attributes:
    chunk: C.
    recurrent: whether the network has recurrent states.
    most_bytes: of all arrays.
    num_bytes: of all arrays now.
  """

  def __init__(self, chunk: int, recurrent: bool, most_bytes: int):
    self.chunk = chunk
    self.recurrent = recurrent
    self.most_bytes = most_bytes
    self.num_bytes = 0
    self._root = Node()
    self._clock = itertools.count(1)

  def find(self, ids: Sequence[int]) -> list[Node]:
    """The nodes from which a prompt can resume, the last one with a state.

    At least one token of the prompt remains, whose logits are wanted.
    """
    path = [node for node in self._path(ids[:-1]) if node is not None]
    while path and self.recurrent and path[-1].state is None:
      path.pop()
    for node in path:
      node.used = next(self._clock)
    return path

  def add(self, ids: Sequence[int], tokens: Any, state: Any) -> None:
    """Adds the last chunk of `ids`, C times n, if the others are known."""
    *parents, node = [self._root, *self._path(ids)]
    parent = parents[-1]
    if parent is None:
      return
    if node is None:
      node = parent.children[tuple(ids[-self.chunk :])] = Node(tokens)
      self.num_bytes += _num_bytes(tokens)
    if node.state is None and self.recurrent:
      node.state = state
      self.num_bytes += _num_bytes(state)
    node.used = next(self._clock)
    while self.num_bytes > self.most_bytes:
      self._drop_one()

  def knows(self, ids: Sequence[int]) -> bool:
    """Whether all chunks of `ids`, and the state after them, are here."""
    *_, last = self._path(ids)
    return last is not None and not (self.recurrent and last.state is None)

  def _path(self, ids: Sequence[int]) -> Iterator[Node | None]:
    """The node of each whole chunk, None where the trie ends."""
    node: Node | None = self._root
    for start in range(0, len(ids) - self.chunk + 1, self.chunk):
      if node is not None:
        node = node.children.get(tuple(ids[start : start + self.chunk]))
      yield node

  def _drop_one(self) -> None:
    """Drops the leaf, or the state of another node, that is oldest in use."""
    droppable = [
      at
      for at in _below(self._root)
      if not at[2].children or at[2].state is not None
    ]
    parent, chunk, node = min(droppable, key=lambda at: at[2].used)
    self.num_bytes -= _num_bytes(node.state)
    node.state = None
    if not node.children:
      self.num_bytes -= _num_bytes(node.tokens)
      del parent.children[chunk]


def _below(parent: Node) -> Iterator[tuple[Node, tuple[int, ...], Node]]:
  for chunk, node in parent.children.items():
    yield parent, chunk, node
    yield from _below(node)


def _num_bytes(tree: Any) -> int:
  return sum(a.nbytes for a in jax.tree.leaves(tree))
