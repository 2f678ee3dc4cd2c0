# SPDX-License-Identifier: Apache-2.0
"""MRLA: attention of a layer's output over earlier layers' outputs.

Multi-head recurrent layer attention (arXiv:2302.03985, and its code) was made
for images: queries and keys come from an average over all positions, and values
from a depthwise 3 x 3 convolution. Neither is causal, so we adapt them to text
(our choice): of a value x [T, D], each token has

  q, k = conv_c(x)    one filter of few taps that slides over the channels
  V = conv_t(x)       three taps per channel: this token and the two before it

Taps are drawn uniformly within 1 / sqrt(taps), the default of the library that
the authors used. Convolutions over tokens do not know about documents: a token
next to a boundary sees up to two tokens of the document before it.
"""

import math
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import over_blocks
from attnres_jax.models.residuals import styles
from attnres_jax.models.residuals import tools

_TOKEN_TAPS = 3


class Projections(nnx.Module):
  """The convolutions of `count` layers, and how their results attend.

  Attributes:
    head_width: channels of a head: 16 as in the authors' DeiT, or their
      greatest common divisor with the width.
    query: taps over channels, [L, W].
    key: taps over channels of keys, [L, W].
    value: taps over tokens, [L, 3, D]; the last one is of the token itself.
  """

  def __init__(self, count: int, width: int, rngs: nnx.Rngs):
    self.head_width = math.gcd(16, width)
    taps = int((math.log2(width) + 1) / 2)
    taps += 1 - taps % 2

    def draw(axes: str, taps: int, *rest: int) -> nnx.Param:
      bound = taps**-0.5
      shape = count, taps, *rest
      drawn = jax.random.uniform(
        rngs.params(), shape, jnp.float32, -bound, bound
      )
      return tools.parameter(axes, drawn)

    self.query = draw("LW", taps)
    self.key = draw("LW", taps)
    self.value = draw("LWD", _TOKEN_TAPS, width)

  def queries(self, l: int, x_BTD: jax.Array) -> jax.Array:
    """Queries of each head [B, T, N, H] in layer l, counted from 0."""
    return self._heads(_over_channels(x_BTD, self.query[l]))

  def keys(self, l: int, x_BTD: jax.Array) -> jax.Array:
    """Keys of each head, shaped like `queries`."""
    return self._heads(_over_channels(x_BTD, self.key[l]))

  def values(self, l: int, x_BTD: jax.Array) -> jax.Array:
    """V [B, T, D] of the l-th layer."""
    return _over_tokens(x_BTD, self.value[l])

  def over_channels(self, weight_BTN: jax.Array) -> jax.Array:
    """The weight of each channel, [B, T, D]: that of its head."""
    return jnp.repeat(weight_BTN, self.head_width, axis=2)

  def _heads(self, x_BTD: jax.Array) -> jax.Array:
    return x_BTD.reshape(*x_BTD.shape[:2], -1, self.head_width)


class Mrla(over_blocks.OverBlocks):
  """MRLA-base after each transformer block, as in the authors' DeiT.

    X_t <- X_t + sum_s softmax_s(q_t . k_s / sqrt(H)) V_s    for each head,

  over the blocks s <= t since the last restart; there is one every four blocks.

  Attributes:
    period: blocks from one restart to the next.
    projections: of each transformer block.
  """

  style = styles.Style("MRLA", "#8a3324", "p")
  certainty = styles.Certainty.CODE
  period = 4

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.projections = Projections(self.num_sublayers // 2, config.width, rngs)

  def combine(self, outputs: tuple[jax.Array, ...]) -> jax.Array:
    last = len(outputs) - 2  # The block that has just run, counted from 0.
    x_BTD = precision.widen(outputs[-1])
    if last < 0:
      return x_BTD
    query_BTNH = self.projections.queries(last, x_BTD)
    scores, values = [], []
    for s in range(last // self.period * self.period, last + 1):
      source_BTD = precision.widen(outputs[s + 1])
      scores.append(_dot(query_BTNH, self.projections.keys(s, source_BTD)))
      values.append(self.projections.values(s, source_BTD))
    scale = self.projections.head_width**-0.5
    weight_MBTN = jax.nn.softmax(scale * jnp.stack(scores), axis=0)
    weight_MBTN = tools.coefficient(weight_MBTN)
    weights = [self.projections.over_channels(w_BTN) for w_BTN in weight_MBTN]
    return x_BTD + over_blocks.weighted_sum(weights, values)


class MrlaLight(base.Residual):
  """MRLA-light: one running sum in place of the list, with learned decay.

    O_t = lambda_t * O_{t-1} + sigmoid(q_t . k_t / sqrt(H)) V_t
    X_t <- X_t + O_t

  after each transformer block. lambda_t [D] is drawn from N(0, 1), as in the
  authors' code. The state is the stream and O, both float32.

  Attributes:
    projections: of each transformer block.
    decay: lambda. The first one has nothing to scale and gets no gradient. No
      weight decay: zero would forget all earlier layers.
  """

  style = styles.Style("MRLA-light", "#8a3324", "h", (0, (4, 2.5)))
  certainty = styles.Certainty.CODE
  segment_size = 2

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    blocks = self.num_sublayers // 2
    self.projections = Projections(blocks, config.width, rngs)
    shape = blocks, config.width
    decay = jax.random.normal(rngs.params(), shape, jnp.float32)
    self.decay = tools.parameter("LD", decay, decays=False)

  def init(self, embedding_BTD: jax.Array) -> "LightState":
    stream_BTD = self.widened(embedding_BTD)
    return LightState(stream_BTD, jnp.zeros_like(stream_BTD))

  def open(self, state: "LightState", start: int, stop: int) -> tuple[Any, Any]:
    # In the middle of a block, nothing has to be added.
    return (self._attend(state, start // 2) if start % 2 == 0 else state), None

  def input(self, carry: "LightState", slot: Any) -> jax.Array:
    return carry.stream_BTD.astype(self.dtype)

  def write(self, carry: Any, slot: Any, y_BTD: jax.Array) -> Any:
    stream_BTD = tools.save(carry.stream_BTD + precision.widen(y_BTD))
    return carry._replace(stream_BTD=stream_BTD)

  def readout(self, state: "LightState") -> jax.Array:
    state = self._attend(state, self.num_sublayers // 2)
    return state.stream_BTD.astype(self.dtype)

  def _attend(self, state: "LightState", t: int) -> "LightState":
    """The state after t blocks, with the output of the t-th attention."""
    if t == 0:
      return state
    x_BTD, old_BTD = state
    made, l = self.projections, t - 1
    score_BTN = _dot(made.queries(l, x_BTD), made.keys(l, x_BTD))
    gate_BTN = jax.nn.sigmoid(made.head_width**-0.5 * score_BTN)
    gate_BTD = made.over_channels(tools.coefficient(gate_BTN))
    new_BTD = over_blocks.weighted_sum(
      (self.decay[l][None, None], gate_BTD), (old_BTD, made.values(l, x_BTD))
    )
    return LightState(x_BTD + new_BTD, tools.save(new_BTD))


class LightState(NamedTuple):
  """State of `MrlaLight`, both [B, T, D] and float32.

  Attributes:
    stream_BTD: X, after a whole block without its attention.
    sum_BTD: O of the last block whose attention has been added.
  """

  stream_BTD: jax.Array
  sum_BTD: jax.Array


class MrlaLinear(tools.Values):
  """The row of MRLA in the table of arXiv:2603.15031, between sublayers.

    h_l = v_0 + sum_{i=1}^{l-1} (sigmoid(q_{l-1}) . sigmoid(k_i)) V_i

  for each head: linear attention over depth, where the query of a read comes
  from the last output. The table says no more; the rest is as in `Mrla` (our
  choice).

  Attributes:
    projections: of each sublayer.
  """

  style = styles.Style("MRLA-linear", "#8a3324", "H", (0, (1, 1.5)))
  certainty = styles.Certainty.PAPER

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.projections = Projections(self.num_sublayers, config.width, rngs)

  def open(self, state: Any, start: int, stop: int) -> tuple[Any, Any]:
    attended = [self._source(i, v_BTD) for i, v_BTD in enumerate(state[1:])]
    return (state, tuple(attended)), None

  def input(self, carry: Any, slot: Any) -> jax.Array:
    """v_0 and what the sublayers so far have mixed."""
    values, attended = carry
    h_BTD = precision.widen(values[0])
    if not attended:
      return h_BTD.astype(self.dtype)
    last_BTD = precision.widen(values[-1])
    query_BTNH = jax.nn.sigmoid(
      self.projections.queries(len(attended) - 1, last_BTD)
    )
    weights = [
      self.projections.over_channels(
        tools.coefficient(_dot(query_BTNH, key_BTNH))
      )
      for key_BTNH, _ in attended
    ]
    mixed_BTD = over_blocks.weighted_sum(weights, [v for _, v in attended])
    return (h_BTD + mixed_BTD).astype(self.dtype)

  def write(self, carry: Any, slot: Any, y_BTD: jax.Array) -> Any:
    values, attended = carry
    y_BTD = tools.save(y_BTD.astype(self.dtype))
    source = self._source(len(attended), y_BTD)
    return (*values, y_BTD), (*attended, source)

  def close(self, state: Any, carry: Any, stop: int) -> tuple[jax.Array, ...]:
    return carry[0]

  def readout(self, state: tuple[jax.Array, ...]) -> jax.Array:
    return self.input(*self.open(state, self.num_sublayers, self.num_sublayers))

  def _source(self, i: int, v_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sigmoid of the key, and the value, of sublayer i, counted from 0."""
    v_BTD = precision.widen(v_BTD)
    key_BTNH = jax.nn.sigmoid(self.projections.keys(i, v_BTD))
    return key_BTNH, self.projections.values(i, v_BTD)


def _dot(a_BTNH: jax.Array, b_BTNH: jax.Array) -> jax.Array:
  return jnp.einsum("BTNH,BTNH->BTN", a_BTNH, b_BTNH)


def _over_channels(x_BTD: jax.Array, taps_W: jax.Array) -> jax.Array:
  """Correlates neighbouring channels with the taps; zeros outside."""
  half = taps_W.size // 2
  return _correlate(jnp.pad(x_BTD, ((0, 0), (0, 0), (half, half))), taps_W, 2)


def _over_tokens(x_BTD: jax.Array, taps_WD: jax.Array) -> jax.Array:
  """Correlates each channel with its taps, the last one of the token itself."""
  before_BWD = tools.before(x_BTD, len(taps_WD) - 1)
  return _correlate(jnp.concatenate([before_BWD, x_BTD], 1), taps_WD, 1)


def _correlate(padded: jax.Array, taps: jax.Array, axis: int) -> jax.Array:
  count = len(taps)
  size = padded.shape[axis] - count + 1
  shifted = [
    jax.lax.slice_in_dim(padded, j, j + size, axis=axis) for j in range(count)
  ]
  # Taps are scalars, or a number for each channel.
  weights = [jnp.reshape(tap, (1, 1, -1)) for tap in taps]
  return over_blocks.weighted_sum(weights, shifted)
