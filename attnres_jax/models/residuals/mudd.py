# SPDX-License-Identifier: Apache-2.0
"""MUDD: dynamic dense connections, one mixture for each use of a read.

Multiway dynamic dense connections (arXiv:2502.12170, and its code). After each
transformer block, every token computes weights for the outputs so far, and
mixes them four times: for the queries, keys and values of the next mixer, and
for the residual stream of the next block.
"""

from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models import norm as norm_lib
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import over_blocks
from attnres_jax.models.residuals import styles
from attnres_jax.models.residuals import tools

_WAYS = 4  # Queries, keys, values and the stream.


class Carry(NamedTuple):
  """What the sublayers of a block read.

  Attributes:
    stream_BTD: float32.
    mixer: the inputs of the mixer, and the gains [D] of its norms of keys and
      values; None for the first block, and after the mixer.
  """

  stream_BTD: jax.Array
  mixer: tuple[base.QKV, jax.Array, jax.Array] | None


class Mudd(over_blocks.OverBlocks):
  """MUDD, in the form that starts as PreNorm.

  With X_0 = v_0 and X_t the output of block t, as in `OverBlocks`,

    A_t = GELU(RMSNorm(X_t) W_1) W_2 + a_t    in R^{C x (t + 1)}
    X^c = sum_j A_t^c_j X_j                   c = q, k, v, r

  Block t + 1 adds its outputs to X^r. Its mixer projects Norm_q(X^q),
  Norm_k(X^k) and Norm_v(X^v), with a gain each: the first is the pre-norm of
  the mixer, the others belong to the scheme. After the last block there is one
  mixture (C = 1), the readout. The first block reads v_0 through one norm (our
  choice). Not included: the options of the authors' JAX code, and widths of
  MLPs that grow with depth.

  W_1 [D, C(t + 1)] (four times as wide after the last block) is drawn from
  N(0, 1 / D), W_2 is zero, and a_t selects X_t. The norm of X_t has no gain.
  Weights are computed in float32.

  Attributes:
    first: the columns of all W_1, one after the other, [hidden, D].
    second: the entries of all W_2, row by row.
    bias: the coefficients of all a_t, each [C, t + 1]. No decay, so that a_t
      stays near the identity.
    key_gain: of Norm_k of blocks 2, 3, ...
    value_gain: of Norm_v.
  """

  style = styles.Style("MUDD", "#00876c", "*")
  certainty = styles.Certainty.CODE

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.eps = config.norm_eps
    blocks, width = self.num_sublayers // 2, config.width
    if blocks < 2:
      config_lib.fail(
        "model.num_layers", blocks, "at least 2 with model.residual.name='mudd'"
      )
    sizes = [self._sizes(t) for t in range(1, blocks + 1)]
    hidden = sum(hidden for hidden, _ in sizes)
    first = jax.random.normal(rngs.params(), (hidden, width), jnp.float32)
    bias = [
      jnp.zeros((outs // (t + 1), t + 1)).at[:, -1].set(1.0)
      for t, (_, outs) in enumerate(sizes, 1)
    ]
    entries = sum(hidden * outs for hidden, outs in sizes)
    self.first = tools.parameter("LD", first * width**-0.5)
    self.second = tools.parameter("L", 0, entries)
    bias_L = jnp.concatenate([a.ravel() for a in bias])
    self.bias = tools.parameter("L", bias_L, decays=False)
    self.key_gain = tools.parameter("LD", 1, blocks - 1, width)
    self.value_gain = tools.parameter("LD", 1, blocks - 1, width)

  def weights(self, outputs: tuple[jax.Array, ...]) -> jax.Array:
    """A_t [C, t + 1, B, T], float32, of (X_0, ..., X_t)."""
    t = len(outputs) - 1
    hidden, outs = self._sizes(t)
    before = [self._sizes(s) for s in range(1, t)]
    units, entries, biases = (
      sum(hidden for hidden, _ in before),
      sum(hidden * outs for hidden, outs in before),
      sum(outs for _, outs in before),
    )
    x_BTD = precision.widen(outputs[-1])
    x_BTD *= norm_lib.inverse_rms(x_BTD, self.eps)
    units_BTH = jax.nn.gelu(
      jnp.einsum(
        "BTD,HD->BTH", x_BTD, self.first[units : units + hidden]
      ),
      approximate=False,
    )  # fmt: skip
    second = self.second[entries : entries + hidden * outs]
    weight_MBT = jnp.einsum(
      "BTH,HM->MBT", units_BTH, second.reshape(hidden, outs)
    )
    weight_MBT += self.bias[biases : biases + outs][:, None, None]
    weight_MBT = tools.coefficient(weight_MBT)
    return weight_MBT.reshape(-1, t + 1, *weight_MBT.shape[1:])

  def mixtures(self, outputs: tuple[jax.Array, ...]) -> list[jax.Array]:
    """X^c for each c [B, T, D], float32."""
    return [
      over_blocks.weighted_sum(row_MBT[..., None], outputs)
      for row_MBT in self.weights(outputs)
    ]

  def open(self, state: Any, start: int, stop: int) -> tuple[Any, Any]:
    if state.partial_BTD is not None:
      return Carry(state.partial_BTD, None), None
    if start == 0:
      return Carry(precision.widen(state.blocks[0]), None), None
    *ways, stream_BTD = self.mixtures(state.blocks)
    reads = base.QKV(*(x_BTD.astype(self.dtype) for x_BTD in ways))
    row = start // 2 - 1
    gains = self.key_gain[row], self.value_gain[row]
    return Carry(stream_BTD, (reads, *gains)), None

  def input(self, carry: Carry, slot: Any) -> Any:
    if carry.mixer is None:
      return carry.stream_BTD.astype(self.dtype)
    return carry.mixer[0]

  def normed(self, carry: Carry, h: Any, norm: base.Norm) -> Any:
    if carry.mixer is None or isinstance(norm, norm_lib.Identity):
      return super().normed(carry, h, norm)
    query_BTD, *others = base.qkv(h)
    key_BTD, value_BTD = map(self._normed, others, carry.mixer[1:])
    return base.QKV(norm(query_BTD), key_BTD, value_BTD)

  def write(self, carry: Carry, slot: Any, y_BTD: jax.Array) -> Carry:
    return Carry(tools.save(carry.stream_BTD + precision.widen(y_BTD)), None)

  def close(self, state: Any, carry: Carry, stop: int) -> Any:
    return super().close(state, carry.stream_BTD, stop)

  def readout(self, state: Any) -> jax.Array:
    return self.mixtures(state.blocks)[0].astype(self.dtype)

  def _sizes(self, t: int) -> tuple[int, int]:
    """Hidden units, and weights, of A_t."""
    if t == self.num_sublayers // 2:
      return 4 * (t + 1), t + 1
    return _WAYS * (t + 1), _WAYS * (t + 1)

  def _normed(self, x_BTD: jax.Array, gain_D: jax.Array) -> jax.Array:
    wide_BTD = precision.widen(x_BTD)
    wide_BTD *= norm_lib.inverse_rms(wide_BTD, self.eps)
    return (wide_BTD * gain_D[None, None]).astype(x_BTD.dtype)
