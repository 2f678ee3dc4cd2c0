# SPDX-License-Identifier: Apache-2.0
"""Gated Residual: several streams, each read through a gate per channel."""

import dataclasses
import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.config import fields
from attnres_jax.models import linear
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import styles
from attnres_jax.models.residuals import tools


class State(NamedTuple):
  """State and carry.

  Attributes:
    streams_BTMD: X, one array, so that vec(Z) is contiguous.
    low_BTR: [W_d, W_w] vec(Z) / m with the parameters of the next read, which
      its gates and its write share.
  """

  streams_BTMD: jax.Array
  low_BTR: jax.Array


class GateSlot(NamedTuple):
  """The parameters of one read, and the first ones of the read after it.

  Attributes:
    gain_MD: gamma.
    up_RMD: W_u.
    next_gain_MD: gamma of the next read.
    next_down_MDR: [W_d, W_w] of the next read.
  """

  gain_MD: jax.Array
  up_RMD: jax.Array
  next_gain_MD: jax.Array
  next_down_MDR: jax.Array


@dataclasses.dataclass(frozen=True)
class Options(config_lib.ResidualConfig):
  """Options of Gated Residual.

  Attributes:
    rank: R of the gates' maps; 0 for width / 8.
    streams: m.
  """

  rank: fields.Function[fields.Count] = 0
  streams: fields.Function[fields.Size] = 4


class GatedResidual(base.Residual):
  """The residual of Qwen3.8-Next (arXiv:2608.30320), from released code.

  m streams X_i, all v_0 at first, with Z_i = RMSNorm(X_i) * (1 + gamma_i):

    G = sigmoid(W_u SiLU(W_d vec(Z) / m))          a gate per stream and channel
    h = 1/m sum_i G_i * Z_i,   y = Core(h)
    s = 2 sigmoid(W_w vec(Z) / m)                  a weight per stream
    X_i <- X_i + s_i y

  A read is also the norm of its sublayer, and the readout, which has separate
  parameters, is the final norm. gamma starts at zero, and matrices start like
  any other: from zero, the streams would never become different.

  Norms, gates and sums are in float32, products in the dtype of activations.

  Attributes:
    gain: gamma, [L + 1, M, D].
    down: W_d, [L + 1, M, D, R]; R is `model.residual.rank`, or D / 8.
    up: W_u, [L + 1, R, M, D].
    weigh: W_w, [L, M, D, M].
  """

  style = styles.Style("Gated Residual", "#1f9bcf", "P")
  certainty = styles.Certainty.CODE
  Options = Options
  pre_norm = False
  final_norm = False

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.eps = config.norm_eps
    self.streams = m = config.residual.streams
    self.rank = config.residual.rank or -(-config.width // 8)
    writes, width = self.num_sublayers, config.width
    matrix = linear.matrices(config.init_std, rngs)
    self.gain = tools.parameter("LMD", 0, writes + 1, m, width)
    self.down = matrix("LMDR", writes + 1, m, width, self.rank)
    self.up = matrix("LRMD", writes + 1, self.rank, m, width)
    self.weigh = matrix("LMDM", writes, m, width, m)

  def init(self, embedding_BTD: jax.Array) -> State:
    embedding_BTD = self.widened(embedding_BTD)
    batch, length, width = embedding_BTD.shape
    streams_BTMD = jnp.broadcast_to(
      embedding_BTD[:, :, None], (batch, length, self.streams, width)
    )
    return self._before(streams_BTMD, self.gain[0], self._both(0, 1)[0])

  def open(self, state: State, start: int, stop: int) -> tuple[Any, Any]:
    return state, GateSlot(
      self.gain[start:stop],
      self.up[start:stop],
      self.gain[start + 1 : stop + 1],
      self._both(start + 1, stop + 1),
    )

  def input(self, carry: State, slot: GateSlot) -> jax.Array:
    return self._read(carry, slot.gain_MD, slot.up_RMD)

  def write(self, carry: State, slot: GateSlot, y_BTD: jax.Array) -> State:
    weight_BTM = 2 * jax.nn.sigmoid(carry.low_BTR[..., self.rank :])
    y_BTMD = precision.widen(tools.save(y_BTD))[:, :, None]
    streams_BTMD = carry.streams_BTMD + weight_BTM[..., None] * y_BTMD
    return self._before(streams_BTMD, slot.next_gain_MD, slot.next_down_MDR)

  def readout(self, state: State) -> jax.Array:
    return self._read(state, self.gain[-1], self.up[-1])

  def _both(self, start: int, stop: int) -> jax.Array:
    """[W_d, W_w] of reads start..stop-1; the readout has no write."""
    down, weigh = self.down[start:stop], self.weigh[start:stop]
    missing = down.shape[0] - weigh.shape[0]
    weigh = jnp.pad(weigh, ((0, missing), (0, 0), (0, 0), (0, 0)))
    return jnp.concatenate([down, weigh], axis=-1)

  def _before(
    self, streams_BTMD: jax.Array, gain_MD: jax.Array, down_MDR: jax.Array
  ) -> State:
    """The state before a read."""
    streams_BTMD = tools.save(streams_BTMD)
    normed_BTMD = _normed(streams_BTMD, gain_MD, self.eps, self.dtype)
    low_BTR = linear.linear(normed_BTMD, down_MDR, 2, streams_BTMD.dtype)
    return State(streams_BTMD, tools.save(low_BTR / self.streams))

  def _read(
    self, state: State, gain_MD: jax.Array, up_RMD: jax.Array
  ) -> jax.Array:
    low_BTR = jax.nn.silu(state.low_BTR[..., : self.rank]).astype(self.dtype)
    logits_BTMD = linear.linear(low_BTR, up_RMD)
    return _gated_mean(
      state.streams_BTMD, gain_MD, logits_BTMD, self.eps, self.dtype
    )


# Checkpointed, so that the streams are the only float32 arrays kept.
@functools.partial(jax.checkpoint, static_argnums=(2, 3))
def _normed(
  streams_BTMD: jax.Array, gain_MD: jax.Array, eps: float, dtype: Any
) -> jax.Array:
  """Z; nothing but gates and weights of streams depends on it."""
  normed_BTMD = tools.rms_norm(streams_BTMD, 1 + gain_MD, eps)
  return tools.coefficient(normed_BTMD).astype(dtype)


@functools.partial(jax.checkpoint, static_argnums=(3, 4))
def _gated_mean(
  streams_BTMD: jax.Array, gain_MD: jax.Array, logits_BTMD: jax.Array,
  eps: float, dtype: Any,
) -> jax.Array:  # fmt: skip
  """The mean of G * Z over streams."""
  gate_BTMD = jax.nn.sigmoid(precision.widen(logits_BTMD))
  normed_BTMD = tools.rms_norm(streams_BTMD, 1 + gain_MD, eps)
  return jnp.mean(gate_BTMD * normed_BTMD, axis=2).astype(dtype)
