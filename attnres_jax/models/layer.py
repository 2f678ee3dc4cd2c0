# SPDX-License-Identifier: Apache-2.0
"""A transformer block: two sublayers, each behind its own pre-norm.

A sublayer is f_l(h) = Core_l(Norm_l(h)), without any skip connection: what it
reads and where its output goes is the residual scheme's affair
(spec: "layer = sublayer", arXiv:2603.15031 section 2).
"""

from flax import nnx
import jax

from attnres_jax import config as config_lib
from attnres_jax.models import mixers
from attnres_jax.models import mlp
from attnres_jax.models import norm as norm_lib

SUBLAYERS = ("mixer", "mlp")


class Layer(nnx.Module):
  """A mixer sublayer and an MLP sublayer."""

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    self.mixer_norm = norm_lib.RMSNorm(config.width, config.norm_eps)
    self.mixer = mixers.Attention(config, rngs=rngs)
    self.mlp_norm = norm_lib.RMSNorm(config.width, config.norm_eps)
    self.mlp = mlp.SwiGLU(config, rngs=rngs)

  def norm(self, kind: str) -> norm_lib.RMSNorm:
    """The pre-norm of the sublayer `kind`, one of `SUBLAYERS`."""
    return self.mixer_norm if kind == "mixer" else self.mlp_norm

  def core(
    self, kind: str, x_BTD: jax.Array, segment_ids_BT: jax.Array | None
  ) -> jax.Array:
    """Output y_BTD of the sublayer `kind` for its normalised input."""
    if kind == "mixer":
      return self.mixer(x_BTD, segment_ids_BT)
    return self.mlp(x_BTD)
