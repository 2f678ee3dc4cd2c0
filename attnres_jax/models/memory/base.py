# SPDX-License-Identifier: Apache-2.0
"""The protocol of a depth memory.

A residual scheme decides what a sublayer reads. A depth memory acts inside
mixers, under any scheme. It keeps heads that a mixer has projected (queries,
keys, values before positions), and later mixers use the heads of the same
token.

  state = memory.init()
  for l in range(L):
    call = Call(kind_l, core_l, x_l, segment_ids)
    y, new = memory.call(call, state, slots[l])
    state = memory.write(state, new)

The structure of a state says which sublayers have run, as far as a memory needs
to know. So sublayers that change it are not part of a scan; the others see it
as a constant.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from flax import nnx
import jax

from attnres_jax import config as config_lib


class Call(NamedTuple):
  """A sublayer's core and its arguments.

  Attributes:
    kind: of the sublayer.
    core: of the sublayer.
    x: its normalised input or inputs.
    segment_ids_BT: document numbers, or None.
  """

  kind: str
  core: Any
  x: Any
  segment_ids_BT: jax.Array | None

  def alone(self) -> jax.Array:
    """y_BTD, by the core itself."""
    return self.core(self.x, self.segment_ids_BT)

  def finish(self, *heads: Any, **more: Any) -> jax.Array:
    """y_BTD, of queries, keys and values as from the core's `project`."""
    return self.core.finish(self.x, *heads, self.segment_ids_BT, **more)


class DepthMemory(nnx.Module):
  """A depth memory; subclasses define the protocol of the module docstring.

  Attributes:
    kinds: mixers that can take part; those have the methods `project` and
      `finish`.
    sublayer_kinds: the kind of each of the L sublayers.
  """

  kinds: tuple[str, ...] = ()

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    del rngs  # For memories that draw parameters.
    self.sublayer_kinds = config.sublayer_kinds
    if max(map(self.sublayer_kinds.count, self.kinds)) < 2:
      config_lib.fail(
        "model.depth_memory",
        config.depth_memory,
        f"'none' unless two mixers are of one kind of {', '.join(self.kinds)}"
        f" (they are {', '.join(self.sublayer_kinds[::2])})",
      )

  def prepare(self, sublayers: Mapping[str, nnx.Module]) -> None:
    """Changes freshly drawn stacks in place, if sublayers share parameters."""

  def init(self) -> Any:
    """State before the first sublayer."""
    return {}

  def changes(self, l: int) -> bool:
    """Whether `write` after sublayer l, from 0, changes the structure."""
    raise NotImplementedError

  def open(self, start: int, stop: int) -> Any:
    """Parameters of sublayers start..stop-1 on a leading axis, if any."""
    return None

  def call(self, call: Call, state: Any, slot: Any) -> tuple[jax.Array, Any]:
    """Runs a sublayer's core: y_BTD, and what `write` adds to the state.

    `state` is before the sublayer, `slot` its part of `open`.
    """
    if call.kind not in self.kinds:
      return call.alone(), {}
    query, key, value = call.core.project(call.x)
    return self.with_heads(call, query, key, value, state, slot)

  def with_heads(
    self, call: Call, query: Any, key: Any, value: Any, state: Any, slot: Any
  ) -> tuple[jax.Array, Any]:
    """`call`, of a mixer's own heads [B, T, N or K, H]."""
    raise NotImplementedError

  def write(self, state: Any, new: Any) -> Any:
    """State after a sublayer."""
    return {**state, **new}


class NoMemory(DepthMemory):
  """Mixers know nothing of each other."""

  def __init__(self, config: Any = None, *, rngs: Any = None):
    """Needs nothing."""

  def changes(self, l: int) -> bool:
    return False
