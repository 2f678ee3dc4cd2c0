# SPDX-License-Identifier: Apache-2.0
"""LAuReL, the learned augmented residual layer (arXiv:2411.07501)."""

import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.config import fields
from attnres_jax.models.residuals import prenorm
from attnres_jax.models.residuals import styles
from attnres_jax.models.residuals import tools


@dataclasses.dataclass(frozen=True)
class Options(config_lib.ResidualConfig):
  """Options of LAuReL.

  Attributes:
    rank: R of the low-rank map; 0 for 64.
  """

  rank: fields.Function[fields.Count] = 0


class LaurelLR(prenorm.Stream):
  """Low rank: a learned map of the stream in addition to the identity.

    h_{l+1} = f_l(h_l) + h_l + B_l A_l h_l

  We could not read the paper: summaries give this sum, and its other two forms
  are not here. Gemma 3n's released code (google-deepmind/gemma) has a relative,
  at attention only, on the sublayer's normalised input n:

    (h_l + f_l(h_l) + n + RMSNorm(B_l A_l n)) / sqrt(2)

  The rank is `model.residual.rank`, 64 unless set, as in that code. B starts at
  zero, so that the network starts as PreNorm, and A at random, of fan-in size
  (our choices). Both products are in float32.

  Attributes:
    down: A, [L, D, R].
    up: B, [L, R, D].
  """

  style = styles.Style("LAuReL-LR", "#5f9e3f", "s")
  Options = Options
  certainty = styles.Certainty.CODE

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    width, rank = config.width, config.residual.rank or 64
    shape = self.num_sublayers, width, rank
    start_LDR = jax.random.normal(rngs.params(), shape) * width**-0.5
    self.down = tools.parameter("LDR", start_LDR)
    self.up = tools.parameter("LRD", 0, shape[0], rank, width)

  def write(self, carry: jax.Array, slot: Any, y_BTD: jax.Array) -> jax.Array:
    low_BTR = jnp.einsum("BTD,DR->BTR", carry, slot.down[...])
    mapped_BTD = jnp.einsum("BTR,RD->BTD", low_BTR, slot.up[...])
    return tools.save(carry + mapped_BTD + precision.widen(y_BTD))
