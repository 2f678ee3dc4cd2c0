# SPDX-License-Identifier: Apache-2.0
"""Hyper-Connections: several streams with learned reads, writes and mixing."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models import norm as norm_lib
from attnres_jax.models.residuals import streams as streams_lib
from attnres_jax.models.residuals import styles
from attnres_jax.models.residuals import tools

_SCALE = 0.01  # Of the dynamic part, at initialisation.


class StaticHyperConnections(streams_lib.Streams):
  """h = sum_i alpha_i X_i;  X_j <- sum_i A_ij X_i + beta_j y.

  Source: the tables of arXiv:2603.15031 and Eq. 3 and 5 of arXiv:2512.24880,
  which restate arXiv:2409.19606; the start is that of two public
  implementations. Every sublayer has its own alpha, beta [M] and A [M, M].
  Initialisation: alpha is one at stream l mod M (l from 0) and else zero, beta
  is ones, A the identity. All streams then equal the plain residual stream, so
  that the network starts as PreNorm (the final norm removes the factor M of the
  summed readout). The mixing matrix, beta_i' A_{i+2} ... A_l alpha_l, is
  M-semiseparable.

  State: M streams. Parameters per sublayer: M (M + 2).
  """

  style = styles.Style("Hyper-Connections, static", "#0f766e", "h", ":")
  certainty = styles.Certainty.PAPER

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    shape = config.num_sublayers, self.num_streams
    turns_LM, eye_MM = streams_lib.in_turn(*shape), jnp.eye(shape[1])
    # No decay: it would pull streams and writes to zero, not to PreNorm.
    parameter = functools.partial(tools.parameter, decays=False)
    self.alpha = parameter("LM", turns_LM)
    self.beta = parameter("LM", 1, *shape)
    self.mix = parameter("LMM", eye_MM, *shape, shape[1])

  def coefficients(
    self, streams: streams_lib.State
  ) -> streams_lib.Coefficients:
    return streams_lib.Coefficients(
      *(
        streams_lib.to_tokens(p[...]) for p in (self.alpha, self.beta, self.mix)
      )
    )


class HyperConnections(StaticHyperConnections):
  """Adds a part to each coefficient that depends on the streams.

    alpha_i = s_a tanh(<n_i, w_a>) + static alpha_i
    beta_j = s_b tanh(<n_j, w_b>) + static beta_j
    A_ij = s_a tanh((n_i W_A)_j) + static A_ij
    n_i = RMSNorm_g(X_i), with one gain g

  Initialisation: W is zero and s 0.01, so that only the static part counts.
  Parameters per sublayer: M (M + 2) + D (M + 2) + D + 2.
  """

  style = styles.Style("Hyper-Connections", "#0f766e", "h")
  certainty = styles.Certainty.PAPER

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.eps = config.norm_eps
    shape = config.num_sublayers, config.width
    self.gain = tools.parameter("LD", 1, *shape)
    self.projection = tools.parameter("LDC", 0, *shape, self.num_streams + 2)
    self.scale = tools.parameter("LC", _SCALE, shape[0], 2)

  def coefficients(
    self, streams: streams_lib.State
  ) -> streams_lib.Coefficients:
    static = super().coefficients(streams)
    weight_DC = self.gain[...][:, None] * self.projection[...]

    def project(x_BTD: jax.Array) -> jax.Array:
      wide_BTD = precision.widen(x_BTD)
      inverse_BT = norm_lib.inverse_rms(wide_BTD, self.eps)[..., 0]
      product_CBT = streams_lib.projected([x_BTD], [weight_DC])
      return jnp.tanh(inverse_BT[None] * product_CBT)

    dynamic_MCBT = jnp.stack([project(x_BTD) for x_BTD in streams])
    read_mix, write = self.scale[...]
    return streams_lib.Coefficients(
      static.read_MBT + read_mix * dynamic_MCBT[:, 0],
      static.write_MBT + write * dynamic_MCBT[:, -1],
      static.mix_MMBT + read_mix * dynamic_MCBT[:, 1:-1],
    )
