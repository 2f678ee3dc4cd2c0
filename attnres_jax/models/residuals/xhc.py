# SPDX-License-Identifier: Apache-2.0
"""xHC: sixteen streams, of which each token updates four per sublayer."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models import norm as norm_lib
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import mhc
from attnres_jax.models.residuals import streams as streams_lib

_STREAMS, _FIXED, _ROUTED = 16, 2, 2
_ACTIVE = _FIXED + _ROUTED
_TAPS = (4, 8, 12)  # Of the convolutions of an MLP's output.
_SCALE = 0.01  # Of what depends on the streams, at initialisation.
_LEAST = 1e-12  # Added to the squared length of a direction.


class Coefficients(NamedTuple):
  """Of one sublayer; C counts its active streams.

  Attributes:
    read_MBT: of all streams.
    write_CRBT: of its updates, with the router's score p.
    mix_CCBT: among active streams.
    chosen_RMBT: which streams are routed to; M without the fixed streams.
  """

  read_MBT: jax.Array
  write_CRBT: jax.Array
  mix_CCBT: jax.Array
  chosen_RMBT: jax.Array


class WriteSlot(NamedTuple):
  """The next sublayer's parameters, and this one's convolutions."""

  following: "XHC"
  is_mlp: jax.Array
  taps: Sequence[jax.Array]  # [W, D] each.


class XHC(streams_lib.Streams):
  """A dense read of all streams, and a sparse update of the active ones A.

    h = sum_i read_i X_i
    X_j <- sum_{i in A} R_ij X_i + p_j sum_r write_jr o_r      for j in A

  A token's active streams are the first two, with p = 1, and two others: with
  the highest scores p = sigmoid(<w_i, RMSNorm(X_i)> s + b_i). read, write and R
  are computed as in mHC, from the normalised active streams. o_0 is the output
  y. After an MLP, o_1..o_3 are causal depthwise convolutions of y over 4, 8 and
  12 tokens. Modified Gram-Schmidt makes them orthogonal to y and to each other.
  All other streams keep their values.

  Source: a summary of arXiv:2607.14530. Our choice: the router's input, and
  initial biases. The router's biases are 1 for two streams that change with
  depth and -1 for the rest. As in mHC, read is open (b = 1) for stream l mod
  16, and o_0 is written to active stream l mod 4. All other biases are -1.
  Convolutions are uniform within 1 / sqrt(taps). Convolutions do not know where
  a document begins.

  State: 16 streams; the readout is their sum. Parameters per sublayer, with
  C = 16 + 4 * 4 + 4 * 4: (4 D + 1) C + 3 and 14 D + 15 of the router, and 24 D
  for each MLP.
  """

  style = base.Style("xHC", "#a21caf", "*")
  certainty = base.Certainty.SUMMARY
  takes = ("streams",)

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    if self.num_streams != _ACTIVE:
      self.refuse(
        f"{_ACTIVE} for xhc: the active ones of its {_STREAMS} streams"
      )
    self.eps = config.norm_eps
    depth, width = config.num_sublayers, config.width
    updates, routed = 1 + len(_TAPS), _STREAMS - _FIXED
    turns = streams_lib.in_turn
    write = -np.ones((depth, _ACTIVE, updates))
    write[..., 0] = 2 * turns(depth, _ACTIVE) - 1
    mix = np.broadcast_to(mhc.almost_identity(_ACTIVE), (depth, _ACTIVE**2))
    bias = 2 * turns(depth, _STREAMS) - 1, write.reshape(depth, -1), mix
    self.sizes = tuple(part.shape[1] for part in bias)
    pairs = turns(depth, routed // _ROUTED).repeat(_ROUTED, axis=1)

    def convolution(taps: int) -> nnx.Param:
      shape, bound = (depth // 2, taps, width), taps**-0.5
      drawn = jax.random.uniform(
        rngs.params(), shape, minval=-bound, maxval=bound
      )
      return base.parameter("LWD", drawn)

    # No decay: it would make all streams equal, as in mHC.
    bias_LC = np.concatenate(bias, axis=1)
    self.bias = base.parameter("LC", bias_LC, decays=False)
    self.router_bias = base.parameter("LM", 2 * pairs - 1, decays=False)
    self.router = base.parameter("LMD", 0, depth, routed, width)
    shape = depth, _ACTIVE, width, sum(self.sizes)
    self.projection = base.parameter("LMDC", 0, *shape)
    # Of read, write, mix and router.
    self.scale = base.parameter("LC", _SCALE, depth, len(bias) + 1)
    self.taps = nnx.List(map(convolution, _TAPS))

  def rows(self, start: int, stop: int) -> "XHC":
    l = np.arange(start, stop)

    def cut(a: jax.Array) -> jax.Array:
      return a[start:stop] if len(a) == self.num_sublayers else a[l // 2]

    return jax.tree.map(cut, self)

  def init(self, embedding_BTD: jax.Array) -> jax.Array:
    stream_BTD = self.widened(embedding_BTD)
    return jnp.broadcast_to(stream_BTD, (_STREAMS, *stream_BTD.shape))

  def open(self, state: jax.Array, start: int, stop: int) -> Any:
    carry, following = super().open(state, start, stop)
    taps = [conv[...] for conv in self.rows(start, stop).taps]
    return carry, WriteSlot(following, jnp.arange(start, stop) % 2 == 1, taps)

  def coefficients(self, streams: jax.Array) -> Coefficients:
    routed_MBTD = streams[_FIXED:]
    *scale, router_scale = self.scale[...]
    product_MBT = jnp.sum(
      routed_MBTD * self.router[...][:, None, None], axis=-1
    )
    inverse_MBT = norm_lib.inverse_rms(routed_MBTD, self.eps)[..., 0]
    score_MBT = streams_lib.to_tokens(self.router_bias[...]) + (
      router_scale * product_MBT * inverse_MBT
    )
    gate_BTR, chosen_BTR = jax.lax.top_k(
      jnp.moveaxis(jax.nn.sigmoid(score_MBT), 0, -1), _ROUTED
    )
    chosen_RMBT = jax.nn.one_hot(
      jnp.moveaxis(chosen_BTR, -1, 0), len(score_MBT), axis=1, dtype=bool
    )
    gate_RBT = jnp.moveaxis(gate_BTR, -1, 0)
    gate_CBT = jnp.concatenate([jnp.ones_like(gate_RBT[:_FIXED]), gate_RBT])
    active = tuple(_active(streams, chosen_RMBT))
    product_CBT = mhc.products(active, self.projection[...], self.eps)
    read_MBT, write_CBT, mix_CBT = mhc.logits(
      product_CBT, self.bias[...], scale, self.sizes
    )
    tokens = gate_CBT.shape[1:]
    write_CRBT = 2 * jax.nn.sigmoid(write_CBT).reshape(_ACTIVE, -1, *tokens)
    return Coefficients(
      jax.nn.sigmoid(read_MBT),
      gate_CBT[:, None] * write_CRBT,
      mhc.doubly_stochastic(mix_CBT),
      chosen_RMBT,
    )

  def input(self, carry: streams_lib.Carry, slot: WriteSlot) -> jax.Array:
    weight_MBT = carry.coefficients.read_MBT
    h_BTD = jnp.sum(weight_MBT[..., None] * carry.streams, axis=0)
    return h_BTD.astype(self.dtype)

  def write(
    self, carry: streams_lib.Carry, slot: WriteSlot, y_BTD: jax.Array
  ) -> streams_lib.Carry:
    streams, (_, write_CRBT, mix_CCBT, chosen_RMBT), _ = carry
    update_RBTD = self.updates(precision.widen(base.save(y_BTD)), slot)
    active_CBTD = _active(streams, chosen_RMBT)
    new_CBTD = jnp.sum(
      mix_CCBT[..., None] * active_CBTD[:, None], axis=0
    ) + jnp.sum(write_CRBT[..., None] * update_RBTD[None], axis=1)
    routed_MBTD = streams[_FIXED:]
    for chosen_MBT, new_BTD in zip(chosen_RMBT, new_CBTD[_FIXED:]):
      routed_MBTD = jnp.where(chosen_MBT[..., None], new_BTD[None], routed_MBTD)
    state = base.save(jnp.concatenate([new_CBTD[:_FIXED], routed_MBTD]))
    return streams_lib.Carry(state, slot.following.fixed(state))

  def readout(self, state: jax.Array) -> jax.Array:
    return jnp.sum(state, axis=0).astype(self.dtype)

  def updates(self, y_BTD: jax.Array, slot: WriteSlot) -> jax.Array:
    """o_0 = y, and its orthogonal convolutions, which are zero for a mixer."""
    updates = [y_BTD]
    for taps_WD in slot.taps:
      o_BTD = _convolved(y_BTD, taps_WD)
      for other_BTD in updates:
        share_BT = jnp.sum(o_BTD * other_BTD, axis=-1) / (
          streams_lib.square(other_BTD) + _LEAST
        )
        o_BTD -= base.coefficient(share_BT)[..., None] * other_BTD
      updates.append(o_BTD)
    of_mlp = slot.is_mlp.astype(y_BTD.dtype)
    return jnp.stack([y_BTD, *(of_mlp * o_BTD for o_BTD in updates[1:])])


def _active(streams: jax.Array, chosen_RMBT: jax.Array) -> jax.Array:
  """The fixed streams, and of the others each token's own."""
  routed = jnp.where(chosen_RMBT[..., None], streams[None, _FIXED:], 0.0)
  return jnp.concatenate([streams[:_FIXED], jnp.sum(routed, axis=1)])


def _convolved(y_BTD: jax.Array, taps_WD: jax.Array) -> jax.Array:
  """Sums each token and those before it; the last tap is the token's own."""
  tokens = y_BTD.shape[1]
  padded = jnp.concatenate([base.before(y_BTD, len(taps_WD) - 1), y_BTD], 1)
  return streams_lib.total(
    tap_D[None, None] * padded[:, w : w + tokens]
    for w, tap_D in enumerate(taps_WD)
  )
