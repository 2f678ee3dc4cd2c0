# SPDX-License-Identifier: Apache-2.0
"""Deep Delta Learning: outputs are directions that are erased and rewritten."""

from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models.residuals import base

_KEY_EPS = 1e-5  # Added, squared, to the squared length of a key.
_SIGMOID_SCALE = 4.0


class Site(NamedTuple):
  """The parameters of one sublayer, see `DDL`."""

  compress_MD: jax.Array | None
  gain_D: jax.Array
  value_DM: jax.Array
  value_bias_M: jax.Array | None
  beta_D: jax.Array
  beta_bias: jax.Array


class DDL(base.Residual):
  """One value channel, in the form of the authors' report.

  The state X has M value channels (d_v), each [D], all v_0 at first.

    x = X, or sum_m c_m * X_m if M > 1          Compress
    z = RMSNorm(x) * gain,   u = Core(z),   k = u / sqrt(|u|^2 + eps^2)
    v = W_v z,   beta = 2 sigmoid(w_beta . z + b_beta)
    X <- X + beta k (v - k^T X)^T               (I - beta k k^T) X + beta k v^T
    h_out = Compress(X)                         then a final norm

  From the report and the authors' code. beta starts at 1, the default of the
  released configurations, where k^T X becomes v; at 0 sublayers would do
  nothing. The embedding is repeated ("w/o EC"). Our choices: c per sublayer,
  without the two factors of their convolution, starting at 1 / M; w_beta and
  W_v start like any matrix.

  The state is one array [B, T, M, D], and all of this is in float32.

  Attributes:
    compress: c, [L + 1, M, D]; None with one channel.
    gain: of the norms, [L, D].
    value: W_v, [L, D, M].
    value_bias: [L, M]; None in this form.
    beta: w_beta, [L, D].
    beta_bias: b_beta, [L].
  """

  style = base.Style("DDL", "#d07a2d", "o")
  certainty = base.Certainty.CODE
  pre_norm = False
  channels = 1
  squashed = False

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.eps = config.norm_eps
    sites, width, channels = self.num_sublayers, config.width, self.channels
    normal = jax.nn.initializers.normal(config.init_std)

    def full(
      start: float, axes: str, *shape: int, **metadata: bool
    ) -> nnx.Param:
      return nnx.Param(
        jnp.full(shape, start, jnp.float32), axes=axes, **metadata
      )

    def drawn(axes: str, *shape: int) -> nnx.Param:
      return nnx.Param(normal(rngs.params(), shape, jnp.float32), axes=axes)

    self.compress = (
      full(1 / channels, "LMD", sites + 1, channels, width, decays=False)
      if channels > 1
      else None
    )
    self.gain = full(1.0, "LD", sites, width)
    self.value = drawn("LDM", sites, width, channels)
    self.value_bias = (
      full(0.0, "LM", sites, channels) if self.squashed else None
    )
    self.beta = drawn("LD", sites, width)
    self.beta_bias = full(0.0, "L", sites)

  def init(self, embedding_BTD: jax.Array) -> jax.Array:
    embedding_BTD = precision.widen(embedding_BTD.astype(self.dtype))
    batch, length, width = embedding_BTD.shape
    return jnp.broadcast_to(
      embedding_BTD[:, :, None], (batch, length, self.channels, width)
    )

  def open(self, state: jax.Array, start: int, stop: int) -> tuple[Any, Any]:
    at = slice(start, stop)
    return state, Site(
      _at(self.compress, at),
      self.gain[at],
      self.value[at],
      _at(self.value_bias, at),
      self.beta[at],
      self.beta_bias[at],
    )

  def read(
    self, carry: jax.Array, slot: Site, norm: base.Norm
  ) -> tuple[jax.Array, Any]:
    h_BTD = self._context(carry, slot)[1].astype(self.dtype)
    return base.normed(h_BTD, norm), carry

  def write(self, carry: jax.Array, slot: Site, y_BTD: jax.Array) -> jax.Array:
    x_BTD, context_BTD = self._context(carry, slot)
    if slot.value_bias_M is not None:
      value_BTM = _project(x_BTD, slot.value_DM) + slot.value_bias_M[None, None]
      value_BTM = _SIGMOID_SCALE * jax.nn.sigmoid(value_BTM)
    else:
      value_BTM = _project(context_BTD, slot.value_DM)
    beta_BT1 = _project(context_BTD, slot.beta_D[:, None]) + slot.beta_bias
    beta_BT1 = 2 * jax.nn.sigmoid(beta_BT1)

    y_BTD = precision.widen(base.save(y_BTD))
    square_BT1 = jnp.sum(jnp.square(y_BTD), axis=-1, keepdims=True)
    length_BT1 = base.coefficient(jnp.sqrt(square_BT1 + _KEY_EPS**2))
    key_BTD = y_BTD / length_BT1
    # What is erased is linear in X, along a direction that analysis holds
    # fixed; what is written is linear in y.
    fixed_BTD = base.coefficient(key_BTD)
    erased_BTM = jnp.sum(fixed_BTD[:, :, None] * carry, axis=-1)
    written_BTM = base.coefficient(beta_BT1 * value_BTM)
    erased_BTM = base.coefficient(beta_BT1) * erased_BTM
    return base.save(
      carry
      + written_BTM[..., None] * key_BTD[:, :, None]
      - erased_BTM[..., None] * fixed_BTD[:, :, None]
    )

  def readout(self, state: jax.Array) -> jax.Array:
    compress_MD = _at(self.compress, self.num_sublayers)
    return _compressed(state, compress_MD).astype(self.dtype)

  def _context(
    self, carry: jax.Array, slot: Site
  ) -> tuple[jax.Array, jax.Array]:
    x_BTD = _compressed(carry, slot.compress_MD)
    return x_BTD, base.rms_norm(x_BTD, slot.gain_D, self.eps)


class DDL4(DDL):
  """Four value channels."""

  style = base.Style("DDL, 4 channels", "#d07a2d", "s")
  certainty = base.Certainty.CODE
  channels = 4


class DDLSigmoid(DDL):
  """v = 4 sigmoid(W_v x + b), from the raw state, as in the released code."""

  style = base.Style("DDL, sigmoid values", "#d07a2d", "^")
  certainty = base.Certainty.CODE
  squashed = True


def _at(parameter: Any, index: Any) -> Any:
  return None if parameter is None else parameter[index]


def _compressed(
  state_BTMD: jax.Array, compress_MD: jax.Array | None
) -> jax.Array:
  if compress_MD is None:
    return state_BTMD[:, :, 0]
  return jnp.sum(compress_MD[None, None] * state_BTMD, axis=2)


def _project(x_BTD: jax.Array, weight_DM: jax.Array) -> jax.Array:
  """A few products per token, in full float32 precision."""
  return jnp.einsum(
    "BTD,DM->BTM", x_BTD, weight_DM, precision=jax.lax.Precision.HIGHEST
  )
