# SPDX-License-Identifier: Apache-2.0
"""HAARES: Block AttnRes that also sees how each block changed (2606.06564).

With b_n the sum of the outputs of block n, as in Block AttnRes,

  d_n = sum of its first half - sum of its second half
  D_n = d_n rms(b_n) / rms(d_n)        the ratio has no gradient

and one softmax per read over b_0, b_1, D_1, b_2, D_2, ..., the open block
included as far as it has run. The logits of details have a bias, so that they
start with little weight. We read the abstracts of both versions. Our choices
are the first half, ceil(|B| / 2) sublayers; a bias that starts at -4 (the
source says "negative"); and separate parameters for each read.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models import layer_stacks
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import definition
from attnres_jax.models.residuals import depth_read


class DetailSlot(NamedTuple):
  """The query of a read, its bias, and the half of its sublayer: 1 or -1."""

  query: definition.Read
  bias: jax.Array
  sign: jax.Array


class State(NamedTuple):
  """State between two sublayers.

  Attributes:
    sources: b_0, b_1, D_1, b_2, D_2, ..., in the model's dtype.
    opened: the float32 sum and difference of the open block; None at a
      boundary.
  """

  sources: tuple[jax.Array, ...]
  opened: tuple[jax.Array, jax.Array] | None


class Haares(depth_read.DepthAttention):
  """Sums and details of blocks as sources of one softmax.

  With a bias of minus infinity it is Block AttnRes; a block of one sublayer has
  D = b. 2 D + 1 parameters per read, twice the blocks of Block AttnRes as
  state. Values of second halves enter D with a minus sign, and so
  M_{i->l} = a_n +- c_n a'_n. The operators know no biases: reads are plain JAX,
  sublayer by sublayer, with any `read` options except the `refused` ones.
  """

  style = base.Style("HAARES", "#0b7a75", "s", (0, (1, 1.5)))
  certainty = base.Certainty.SUMMARY
  block_size: int  # pyrefly: ignore[bad-override-mutable-attribute]

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    size = config.residual.sublayers_per_block(config.num_sublayers)
    self.block_size = self.segment_size = size
    super().__init__(config, rngs=rngs)
    self.form = "one_softmax"
    self.bias = base.parameter("L", -4, self.num_sublayers + 1, decays=False)

  def read_options(
    self, given: config_lib.DepthReadConfig
  ) -> config_lib.DepthReadConfig:
    refused = "query", "score", "window", "null", "value_query"
    default = config_lib.DepthReadConfig()
    for name in refused:
      value, accepted = getattr(given, name), getattr(default, name)
      if value != accepted:
        config_lib.fail(
          f"model.residual.read.{name}", value, f"{accepted!r} with haares"
        )
    return given

  def init(self, embedding_BTD: jax.Array) -> State:
    return State((embedding_BTD.astype(self.dtype),), None)

  def open(self, state: State, start: int, stop: int) -> tuple[Any, Any]:
    return state, self._parameters(start, stop)

  def input(self, carry: State, slot: DetailSlot) -> jax.Array:
    sources = self._all_sources(carry)
    if len(sources) == 1:
      return sources[0]
    weights_MBTH = base.coefficient(self._weights(slot, sources))
    mixture = definition.mix(self.options, weights_MBTH, slot.query, sources)
    return mixture.astype(self.dtype)

  def write(self, carry: Any, slot: Any, y_BTD: jax.Array) -> Any:
    y_BTD = precision.widen(y_BTD)
    signed_BTD = slot.sign.astype(y_BTD.dtype) * y_BTD
    opened = y_BTD, signed_BTD
    if carry.opened is not None:
      opened = carry.opened[0] + y_BTD, carry.opened[1] + signed_BTD
    return carry._replace(opened=tuple(map(base.save, opened)))

  def close(self, state: State, carry: Any, stop: int) -> State:
    if stop % self.block_size and stop != self.num_sublayers:
      return carry
    return State(self._all_sources(carry), None)

  def readout(self, state: State) -> jax.Array:
    last = self.num_sublayers
    slots = self._parameters(last, last + 1)
    return self.input(state, layer_stacks.single(slots))

  def take_apart(self, state: State) -> tuple[Any, Any]:
    """A block and its detail are one array [2, B, T, D]."""
    first, *others = state.sources
    pairs = [(first, jnp.zeros_like(first))]
    pairs += zip(others[::2], others[1::2], strict=True)
    return tuple(map(jnp.stack, pairs)), state.opened

  def put_together(self, blocks: tuple[jax.Array, ...], rest: Any) -> Any:
    first, *others = blocks
    sources = [part for pair in others for part in (pair[0], pair[1])]
    return State((first[0], *sources), rest)

  def depth_weights(self, values: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    slots = self._parameters(0, self.num_sublayers + 1)
    state, weights = self.init(values[0]), []
    for l in range(self.num_sublayers + 1):
      slot = jax.tree.map(lambda a, l=l: a[l], slots)
      weights_MBTH = self._weights(slot, self._all_sources(state))
      weights.append(jnp.mean(weights_MBTH, axis=-1))
      if l < self.num_sublayers:
        carry = self.write(state, slot, values[l + 1])
        state = self.close(state, carry, l + 1)
    return tuple(weights)

  def source_labels(self) -> tuple[tuple[str, ...], ...]:
    labels = []
    for l in range(self.num_sublayers + 1):
      begun = -(-l // self.block_size)
      pairs = ((f"block {n + 1}", f"detail {n + 1}") for n in range(begun))
      labels.append(("embedding", *(name for pair in pairs for name in pair)))
    return tuple(labels)

  def _parameters(self, start: int, stop: int) -> DetailSlot:
    return DetailSlot(
      self.queries.reads(start, stop),
      self.bias[start:stop],
      jnp.asarray([self._sign(l) for l in range(start, stop)], jnp.float32),
    )

  def _sign(self, l: int) -> int:
    """Of sublayer l, counted from 0: 1 in the first half of its block."""
    start = l - l % self.block_size
    size = min(self.block_size, self.num_sublayers - start)
    return 1 if 2 * (l - start) < size else -1

  def _all_sources(self, state: State) -> tuple[jax.Array, ...]:
    if state.opened is None:
      return state.sources
    total_BTD, difference_BTD = state.opened
    ratio_BT1 = self._rms(total_BTD) / self._rms(difference_BTD)
    detail_BTD = difference_BTD * jax.lax.stop_gradient(ratio_BT1)
    pair = (x.astype(self.dtype) for x in (total_BTD, detail_BTD))
    return (*state.sources, *pair)

  def _rms(self, x_BTD: jax.Array) -> jax.Array:
    mean_square = jnp.mean(jnp.square(x_BTD), axis=-1, keepdims=True)
    return jnp.sqrt(mean_square + self.eps)

  def _weights(
    self, slot: DetailSlot, sources: tuple[jax.Array, ...]
  ) -> jax.Array:
    """[M, B, T, H]; details are every second source, from the third."""
    scores = []
    for i, source_BTD in enumerate(sources):
      score_BTH = definition.score(
        self.options, slot.query.query, source_BTD, self.eps
      )
      is_detail = i and i % 2 == 0
      scores.append(score_BTH + slot.bias if is_detail else score_BTH)
    return jax.nn.softmax(jnp.stack(scores), axis=0)
