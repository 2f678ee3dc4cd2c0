# SPDX-License-Identifier: Apache-2.0
"""Multi-Gate Residuals: streams that move towards each output by a gate."""

import math
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.config import errors
from attnres_jax.models import norm as norm_lib
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import streams as streams_lib

# The update of a stream at a depth of 21 is sigmoid(-3); it falls with the
# square root of depth.
_DEPTH, _GATE = 21, -3.0


class Site(NamedTuple):
  """What a sublayer needs.

  Attributes:
    scheme: its parameters.
    is_open_M: which streams exist when the sublayer reads.
    opens_M: which stream its output becomes, if any.
  """

  scheme: Any
  is_open_M: jax.Array
  opens_M: jax.Array


class MultiGate(base.Residual):
  """Streams read by a softmax over them, each with a gate for every output.

    a = softmax_i(<w_l, RMSNorm(S_i)> / sqrt(D)),   h_l = sum_i a_i S_i
    b_i = sigmoid(<u_l, RMSNorm(S_i)> / sqrt(D) + c_i)
    S_i <- (1 - b_i) S_i + b_i y

  The embedding is stream 1, and outputs 1..M-1 become streams 2..M, ungated.
  (Equal streams would stay equal.) No stream grows: |S| <= max(|v_0|, max |y|).
  The readout is one more read, with its own query. Initialisation: w = u = 0,
  and c such that every gate is sigmoid(-3) sqrt(21 / L). The mixing matrix is
  M-semiseparable.

  Source: summaries of arXiv:2605.23259 and a public port; L as the number of
  sublayers is our choice.

  State: M streams; those not yet open are zeros. Parameters: 2 D + M per
  sublayer, and D for the readout.
  """

  style = base.Style("Multi-Gate", "#4d7c0f", "8")
  takes = ("streams",)
  certainty = base.Certainty.SUMMARY

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.eps = config.norm_eps
    self.num_streams = config.residual.streams
    depth, width = config.num_sublayers, config.width
    # No decay: it would pull reads to the plain mean, and gates to one half.
    self.query = base.parameter("LD", 0, depth + 1, width, decays=False)
    self.gate_query = base.parameter("LD", 0, depth, width)
    start, count = self.start_bias()
    self.bias = base.parameter("LC", start, depth, count, decays=False)

  def start_bias(self) -> tuple[float, int]:
    """Each c, such that all gates are `_start_gate`, and how many there are."""
    gate = _start_gate(self.num_sublayers)
    return math.log(gate / (1 - gate)), self.num_streams

  def gates(self, score_MBT: jax.Array, bias_C: jax.Array) -> jax.Array:
    """The gates b [M, B, T]."""
    return jax.nn.sigmoid(score_MBT + streams_lib.to_tokens(bias_C))

  def init(self, embedding_BTD: jax.Array) -> streams_lib.State:
    stream_BTD = self.widened(embedding_BTD)
    empty = [jnp.zeros_like(stream_BTD)] * (self.num_streams - 1)
    return (stream_BTD, *empty)

  def open(
    self, state: streams_lib.State, start: int, stop: int
  ) -> tuple[streams_lib.State, Site]:
    stream_1M = jnp.arange(self.num_streams)[None]
    l_L1 = jnp.arange(start, stop)[:, None]
    rows = self.rows(start, stop)
    return state, Site(rows, stream_1M <= l_L1, stream_1M == l_L1 + 1)

  def input(self, carry: streams_lib.State, slot: Site) -> jax.Array:
    return self._attend(carry, slot.scheme.query[...], slot.is_open_M)

  def write(
    self, carry: streams_lib.State, slot: Site, y_BTD: jax.Array
  ) -> streams_lib.State:
    y_BTD = precision.widen(base.save(y_BTD))
    score_MBT = self._scores(carry, slot.scheme.gate_query[...])
    gate_MBT = self.gates(score_MBT, slot.scheme.bias[...])
    # While streams open, the others do not change.
    opens_M11 = streams_lib.to_tokens(slot.opens_M)
    gate_MBT = jnp.where(jnp.any(slot.opens_M), 0.0, gate_MBT)
    gate_MBT = base.coefficient(jnp.where(opens_M11, 1.0, gate_MBT))
    return tuple(
      base.save((1 - gate_BT[..., None]) * x_BTD + gate_BT[..., None] * y_BTD)
      for gate_BT, x_BTD in zip(gate_MBT, carry)
    )

  def readout(self, state: streams_lib.State) -> jax.Array:
    is_open_M = jnp.arange(self.num_streams) <= self.num_sublayers
    return self._attend(state, self.query[-1], is_open_M)

  def _attend(
    self, streams: streams_lib.State, query_D: jax.Array, is_open_M: jax.Array
  ) -> jax.Array:
    score_MBT = self._scores(streams, query_D)
    weight_MBT = jax.nn.softmax(
      score_MBT, axis=0, where=streams_lib.to_tokens(is_open_M)
    )
    weight_MBT = base.coefficient(weight_MBT)
    return streams_lib.combine(weight_MBT, streams).astype(self.dtype)

  def _scores(
    self, streams: streams_lib.State, query_D: jax.Array
  ) -> jax.Array:
    """Of each stream, <query, RMSNorm(S_i)> / sqrt(D): [M, B, T]."""

    def score(x_BTD: jax.Array) -> jax.Array:
      product_BT = jnp.sum(x_BTD * query_D[None, None], axis=-1)
      inverse_BT = norm_lib.inverse_rms(x_BTD, self.eps)[..., 0]
      return product_BT * inverse_BT / math.sqrt(len(query_D))

    return jnp.stack([score(x_BTD) for x_BTD in streams])


class MultiGateCompetitive(MultiGate):
  """The same, with gates that compete: one softmax over c and all scores.

    b = softmax(c, <u_l, RMSNorm(S_1)> / sqrt(D), ...), without its first entry

  Initialisation: c = ln(sqrt(L / 21) (e^3 + 1) - M), for the same gates.
  """

  style = base.Style("Multi-Gate, competitive", "#4d7c0f", "8", ":")
  certainty = base.Certainty.SUMMARY

  def start_bias(self) -> tuple[float, int]:
    rest = 1 / _start_gate(self.num_sublayers) - self.num_streams
    if rest <= 0:
      errors.fail(
        "model.residual.streams",
        self.num_streams,
        f"fewer for the {self.num_sublayers} sublayers of model.num_layers",
      )
    return math.log(rest), 1

  def gates(self, score_MBT: jax.Array, bias_C: jax.Array) -> jax.Array:
    forget = jnp.broadcast_to(bias_C[:, None, None], score_MBT[:1].shape)
    scores = jnp.concatenate([forget, score_MBT])
    return jax.nn.softmax(scores, axis=0)[1:]


def _start_gate(num_sublayers: int) -> float:
  """The share of a new output in every stream, at initialisation."""
  return math.sqrt(_DEPTH / num_sublayers) / (1 + math.exp(-_GATE))
