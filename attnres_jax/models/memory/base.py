# SPDX-License-Identifier: Apache-2.0
"""The protocol of a depth memory.

A residual scheme decides what a sublayer reads. A depth memory acts inside
mixers, under any scheme. It keeps heads that a mixer has projected (queries,
keys, values before positions), and later mixers use the heads of the same
token.

  state = memory.init()
  for l in range(L):
    y, new = memory.call(kind_l, core_l, x_l, segment_ids, state, slots[l])
    state = memory.write(state, new)

The structure of a state says which sublayers have run, as far as a memory needs
to know. So sublayers that change it are not part of a scan; the others see it
as a constant.
"""

from collections.abc import Mapping
from typing import Any

from flax import nnx
import jax

from attnres_jax import config as config_lib


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
    """Changes freshly drawn sublayers in place, if they share parameters.

    Args:
      sublayers: a stack of `Sublayer`s for each kind.
    """

  def init(self) -> Any:
    """State before the first sublayer."""
    return {}

  def changes(self, l: int) -> bool:
    """Whether `write` after sublayer l, from 0, changes the structure."""
    raise NotImplementedError

  def open(self, start: int, stop: int) -> Any:
    """Parameters of sublayers start..stop-1 on a leading axis, if any."""
    del start, stop
    return None

  def call(
    self,
    kind: str,
    core: Any,
    x: Any,
    segment_ids_BT: jax.Array | None,
    state: Any,
    slot: Any,
  ) -> tuple[jax.Array, Any]:
    """Runs a sublayer's core.

    Args:
      kind: of the sublayer.
      core: of the sublayer.
      x: its normalised input or inputs.
      segment_ids_BT: document numbers, or None.
      state: before the sublayer.
      slot: of the sublayer, from `open`.

    Returns:
      y_BTD, and what `write` adds to the state.
    """
    raise NotImplementedError

  def write(self, state: Any, new: Any) -> Any:
    """State after a sublayer."""
    return {**state, **new}


class NoMemory(DepthMemory):
  """Mixers know nothing of each other."""

  def __init__(
    self,
    config: config_lib.ModelConfig | None = None,
    *,
    rngs: nnx.Rngs | None = None,
  ):
    del config, rngs

  def changes(self, l: int) -> bool:
    del l
    return False

  def call(
    self,
    kind: str,
    core: Any,
    x: Any,
    segment_ids_BT: jax.Array | None,
    state: Any,
    slot: Any,
  ) -> tuple[jax.Array, Any]:
    del kind, state, slot
    return core(x, segment_ids_BT), {}
