# SPDX-License-Identifier: Apache-2.0
"""Delta AttnRes: depth attention that is added to the residual stream.

  h_l = x_l + alpha_l sum_i a_{i->l} s_i        x_l = v_0 + ... + v_{l-1}
  h_out = x_{L+1}

h_1 is x_1 alone. Delta AttnRes has alpha = 1, unless `model.residual.gate` says
otherwise, and its sources s_i are all earlier outputs (arXiv:2605.18855, from
its code; the paper was not read). The block form has the sources b_0 = v_0,
b_1, ..., the change of the stream over each completed block. The open block is
none, and a block becomes one only after the first sublayer behind it has read.
So phase 1 is the whole read, and a segment scans with the stream as its carry.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any, Literal, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.config import fields
from attnres_jax.models import norm as norm_lib
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import definition
from attnres_jax.models.residuals import depth_read
from attnres_jax.models.residuals import full_attnres
from attnres_jax.models.residuals import styles
from attnres_jax.models.residuals import tools

# Where the parameter of a sigmoid gate starts (arXiv:2605.18855, its code).
_CLOSED = -2.0


class Carry(NamedTuple):
  """The input of a read: its sources, in the scheme's form, and the stream.

  Attributes:
    sources: of the attention.
    stream_BTD: x_l, float32.
    newest: a block that becomes a source after this read, or nothing.
  """

  sources: Any
  stream_BTD: jax.Array
  newest: tuple[jax.Array, ...] = ()


class GatedSlot(NamedTuple):
  """alpha_l, a number or [D], and the slot of the attention."""

  gate: jax.Array
  attention: Any


@dataclasses.dataclass(frozen=True)
class Options(config_lib.DepthAttentionConfig):
  """Options of Delta AttnRes and its relatives.

  Attributes:
    gate: factor of the depth mixture. `one` is no gate; `zero`, a number per
      sublayer that starts at zero; `scalar` and `vector`, the sigmoid of a
      number per sublayer, or channel, that starts at -2. `own` is the scheme's
      own: `zero` in `delta_mh`, else `one`.
  """

  gate: fields.Function[Literal["own", "one", "zero", "scalar", "vector"]] = (
    "own"
  )
  gate_of_scheme = "one"


@dataclasses.dataclass(frozen=True)
class HeadsOptions(Options):
  """Options of `delta_mh`, which has 8 heads and a learned null source."""

  gate_of_scheme = "zero"

  @property
  def effective_read(self) -> config_lib.DepthReadConfig:
    self.read.require(
      self.read.null != "zero",
      "null",
      "'learned', or 'none' for the scheme's own, which is learned",
    )
    heads = self.read.heads or 8
    return dataclasses.replace(self.read, heads=heads, null="learned")


class Stream(depth_read.DepthAttention):
  """Shared by all forms: the stream, its gate, no attention at the readout.

  That the gates of the released code are parameters, and do not depend on the
  input, is our reading.

  Attributes:
    gate: alpha of sublayers, [L]; with `model.residual.gate`, what a sigmoid
      makes alpha of, [L] or [L, D]. None if it is 1.
  """

  attends_last = False
  Options = Options

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    gate = config.residual.gate
    if gate == "own":
      gate = config.residual.gate_of_scheme
    self.bounded = gate in ("scalar", "vector")
    shape = (self.num_sublayers, config.width)[: 2 if gate == "vector" else 1]
    axes, start = "LD"[: len(shape)], _CLOSED if self.bounded else 0.0
    # No decay: towards zero, it would take the attention away again.
    self.gate = (
      tools.parameter(axes, start, *shape, decays=False)
      if gate != "one"
      else None
    )

  def gates(self, start: int, stop: int) -> jax.Array:
    """Alpha of sublayers start..stop-1; 0 for the first sublayer of all."""
    attends = jnp.arange(start, stop) > 0
    if self.gate is None:
      return attends.astype(jnp.float32)
    gate = self.gate[start:stop]
    if self.bounded:
      gate = jax.nn.sigmoid(gate)
    return jnp.where(attends.reshape(-1, *[1] * (gate.ndim - 1)), gate, 0)

  def add(
    self, stream_BTD: jax.Array, gate: jax.Array, rho: jax.Array | base.QKV
  ) -> jax.Array | base.QKV:
    """The stream plus the gated mixture."""
    # One number, or one for each channel.
    gate_11D = gate.astype(stream_BTD.dtype).reshape(1, 1, -1)

    def added(one_BTD):
      sum_BTD = stream_BTD + gate_11D * precision.widen(one_BTD)
      return sum_BTD.astype(self.dtype)

    return jax.tree.map(added, rho)


@dataclasses.dataclass(frozen=True)
class ValuesOptions(Options, full_attnres.Options):
  """Options of the form over all values."""


class DeltaAttnRes(Stream, full_attnres.FullAttnRes):
  """Delta AttnRes over all values.

  PreNorm's function at zero queries, where h_l = x_l (1 + 1/l) for l > 1. The
  state is Full AttnRes's, whose sum is the stream; 2 D parameters per sublayer.
  M_{i->l} = 1 + a_{i->l}.
  """

  style = styles.Style("Delta AttnRes", "#8a4fc4", "^", (0, (4, 2.5)))
  certainty = styles.Certainty.CODE
  headline = False
  Options = ValuesOptions

  def open(self, state: Any, start: int, stop: int) -> tuple[Any, Any]:
    sources, slots = super().open(state, start, stop)
    return Carry(sources, _sum(state)), GatedSlot(
      self.gates(start, stop), slots
    )

  def read(
    self, carry: Any, slot: Any, norm: base.Norm
  ) -> tuple[jax.Array | base.QKV, Any]:
    rho, _ = super().read(carry.sources, slot.attention, norm_lib.Identity())
    h = self.add(carry.stream_BTD, slot.gate, rho)
    return base.normed(h, norm), carry

  def write(self, carry: Any, slot: Any, y_BTD: jax.Array) -> Any:
    sources = super().write(carry.sources, slot.attention, y_BTD)
    # The kept output, not one that has to be computed again.
    y_BTD = precision.widen(sources.opened[-1])
    return Carry(sources, carry.stream_BTD + y_BTD)

  def close(self, state: Any, carry: Any, stop: int) -> tuple[jax.Array, ...]:
    return super().close(state, carry.sources, stop)

  def readout(self, state: tuple[jax.Array, ...]) -> jax.Array:
    return _sum(state).astype(self.dtype)

  def depth_weights(self, values: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    reads = range(1, self.num_sublayers)
    attended = [self.mean_weights(l, values[: l + 1]) for l in reads]
    return (_no_weights(values[:1]), *attended, _no_weights(values))


class BlockState(NamedTuple):
  """b_0, b_1, ... of the completed blocks, and the stream in float32."""

  blocks: tuple[jax.Array, ...]
  stream_BTD: jax.Array


class DeltaBlock(Stream):
  """The block form, which is not PreNorm at its start.

  A block is what the stream changed by since the last one was completed,
  x - sum(b), which also takes up what rounding the earlier ones has lost. (The
  released code of both papers subtracts only the newest block.)
  """

  style = styles.Style("Delta Block AttnRes", "#8a4fc4", "s", (0, (4, 2.5)))
  certainty = styles.Certainty.CODE
  has_blocks = True
  block_size: int  # pyrefly: ignore[bad-override-mutable-attribute]
  stream = True

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    size = config.residual.sublayers_per_block(config.num_sublayers)
    self.block_size = self.segment_size = size
    super().__init__(config, rngs=rngs)
    self.scannable = self.two_phase

  def init(self, embedding_BTD: jax.Array) -> BlockState:
    embedding_BTD = embedding_BTD.astype(self.dtype)
    return BlockState((embedding_BTD,), precision.widen(embedding_BTD))

  def open(self, state: BlockState, start: int, stop: int) -> tuple[Any, Any]:
    reads, gates = self.queries.reads(start, stop), self.gates(start, stop)
    seen = self._seen_first(state.blocks, start)
    if not self.two_phase:
      carry = Carry(seen, state.stream_BTD, state.blocks[len(seen) :])
      return carry, GatedSlot(gates, reads)
    # Phase 1 is the whole attention of the segment, and nothing else is read.
    rho = self._mixtures(reads, state.blocks)
    if seen and len(seen) < len(state.blocks):
      first = self._mixtures(jax.tree.map(lambda a: a[:1], reads), seen)
      rho = jax.tree.map(lambda a, row: a.at[:1].set(row), rho, first)
    return Carry((), state.stream_BTD), GatedSlot(gates, rho)

  def read(
    self, carry: Any, slot: Any, norm: base.Norm
  ) -> tuple[jax.Array | base.QKV, Any]:
    rho = slot.attention
    if not self.two_phase:
      # The first sublayer of all has no source, and a gate of zero.
      rho = self.reader.attend(rho, carry.sources or carry.newest)
    return base.normed(self.add(carry.stream_BTD, slot.gate, rho), norm), carry

  def write(self, carry: Any, slot: Any, y_BTD: jax.Array) -> Any:
    stream_BTD = tools.save(carry.stream_BTD + precision.widen(y_BTD))
    return Carry((*carry.sources, *carry.newest), stream_BTD)

  def close(self, state: BlockState, carry: Any, stop: int) -> BlockState:
    return self._commit(state.blocks, carry.stream_BTD, stop)

  def readout(self, state: BlockState) -> jax.Array:
    return state.stream_BTD.astype(self.dtype)

  def take_apart(self, state: BlockState) -> tuple[Any, Any]:
    return state

  def put_together(self, blocks: tuple[jax.Array, ...], rest: Any) -> Any:
    return BlockState(blocks, rest)

  def depth_weights(self, values: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    state, weights = self.init(values[0]), []
    for l in range(self.num_sublayers):
      seen = self._seen_first(state.blocks, l)
      weights.append(
        self.mean_weights(l, seen) if seen else _no_weights(state.blocks)
      )
      stream_BTD = state.stream_BTD + precision.widen(values[l + 1])
      state = self._commit(state.blocks, stream_BTD, l + 1)
    return (*weights, _no_weights(weights[-1]))

  def source_labels(self) -> tuple[tuple[str, ...], ...]:
    labels = []
    for l in [*range(self.num_sublayers), self.num_sublayers - 1]:
      done = l // self.block_size - (l % self.block_size == 0)
      blocks = (f"block {n + 1}" for n in range(done))
      labels.append(("embedding", *blocks))
    return tuple(labels)

  def _mixtures(
    self, reads: definition.Read, sources: tuple[jax.Array, ...]
  ) -> jax.Array | base.QKV:
    _, slots = self.reader.open(reads, sources)
    return tools.each(slots, lambda slot: slot.out_BTD)

  def _seen_first(
    self, blocks: tuple[jax.Array, ...], start: int
  ) -> tuple[jax.Array, ...]:
    """The sources of sublayer `start`: not yet a block that ends before it."""
    return blocks[:-1] if start % self.block_size == 0 else blocks

  def _commit(
    self, blocks: tuple[jax.Array, ...], stream_BTD: jax.Array, stop: int
  ) -> BlockState:
    if stop % self.block_size == 0 and stop < self.num_sublayers:
      block_BTD = stream_BTD - _sum(blocks)
      blocks = (*blocks, block_BTD.astype(self.dtype))
    return BlockState(blocks, stream_BTD)


class DeltaHeads(DeltaBlock):
  """Multi-head Delta AttnRes, as a PreNorm checkpoint is converted to it.

  Converting adds heads, a null source and a gate.
  With alpha = 0, which is its start, the network is the same PreNorm bit by
  bit, whatever else its parameters are (arXiv:2607.27230, section on
  conversion, its own text and code). The first step moves only alpha; queries,
  gains and null sources follow. With 8 heads unless configured otherwise;
  3 D + 1 parameters per sublayer, of which the first has no use.
  """

  style = styles.Style("Delta MHAR", "#8a4fc4", "D")
  certainty = styles.Certainty.CODE
  Options = HeadsOptions


def _no_weights(sources: Sequence[jax.Array]) -> jax.Array:
  """Weights [M, B, T] of a read that does not attend: zeros."""
  return jnp.zeros((len(sources), *sources[0].shape[:2]), jnp.float32)


def _sum(values: Sequence[jax.Array]) -> jax.Array:
  """In the order of depth, like a running sum."""
  first, *others = map(precision.widen, values)
  for value_BTD in others:
    first = first + value_BTD
  return first
