# SPDX-License-Identifier: Apache-2.0
"""Deep Delta Learning: outputs are directions that are erased and rewritten."""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models import linear
from attnres_jax.models.residuals import base

_KEY_EPS = 1e-5  # Added, squared, to the squared length of a key.
_SIGMOID_SCALE = 4.0


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
    matrix = linear.matrices(config.init_std, rngs)
    shape = sites + 1, channels, width
    compress = base.parameter("LMD", 1 / channels, *shape, decays=False)
    self.compress = compress if channels > 1 else None
    self.gain = base.parameter("LD", 1, sites, width)
    self.value = matrix("LDM", sites, width, channels)
    bias = base.parameter("LM", 0, sites, channels)
    self.value_bias = bias if self.squashed else None
    self.beta = matrix("LD", sites, width)
    self.beta_bias = base.parameter("L", 0, sites)

  def init(self, embedding_BTD: jax.Array) -> jax.Array:
    embedding_BTD = self.widened(embedding_BTD)
    batch, length, width = embedding_BTD.shape
    return jnp.broadcast_to(
      embedding_BTD[:, :, None], (batch, length, self.channels, width)
    )

  def open(self, state: jax.Array, start: int, stop: int) -> tuple[Any, Any]:
    return state, self.rows(start, stop)

  def input(self, carry: jax.Array, slot: Any) -> jax.Array:
    return self._context(carry, slot)[1].astype(self.dtype)

  def write(self, carry: jax.Array, slot: Any, y_BTD: jax.Array) -> jax.Array:
    x_BTD, context_BTD = self._context(carry, slot)
    if slot.value_bias is not None:
      value_BTM = _project(x_BTD, slot.value) + slot.value_bias[None, None]
      value_BTM = _SIGMOID_SCALE * jax.nn.sigmoid(value_BTM)
    else:
      value_BTM = _project(context_BTD, slot.value)
    beta_BT1 = _project(context_BTD, slot.beta[:, None]) + slot.beta_bias[...]
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
    compress = None if self.compress is None else self.compress[-1]
    return _compressed(state, compress).astype(self.dtype)

  def _context(
    self, carry: jax.Array, slot: Any
  ) -> tuple[jax.Array, jax.Array]:
    """The stream x, and its norm z."""
    compress = None if slot.compress is None else slot.compress[...]
    x_BTD = _compressed(carry, compress)
    return x_BTD, base.rms_norm(x_BTD, slot.gain[...], self.eps)


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


def _compressed(
  state_BTMD: jax.Array, compress_MD: jax.Array | None
) -> jax.Array:
  if compress_MD is None:
    return state_BTMD[:, :, 0]
  return jnp.sum(compress_MD[None, None] * state_BTMD, axis=2)


def _project(x_BTD: jax.Array, weight_DM: Any) -> jax.Array:
  """A few products per token, in full float32 precision."""
  exact = jax.lax.Precision.HIGHEST
  return jnp.einsum("BTD,DM->BTM", x_BTD, weight_DM[...], precision=exact)
