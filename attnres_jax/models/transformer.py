# SPDX-License-Identifier: Apache-2.0
"""Decoder-only transformer: embed, trunk, final norm, head."""

from flax import nnx
import jax

from attnres_jax import config as config_lib
from attnres_jax.models import embedding
from attnres_jax.models import layer
from attnres_jax.models import norm
from attnres_jax.models import residuals
from attnres_jax.models import stack


class Transformer(nnx.Module):
  """A language model over tokens, under any residual scheme.

  Attributes:
    config: the shape of the network.
    embedding: token vectors and output head.
    layers: ONE module; every leaf has a leading axis of transformer blocks.
    residual: the scheme that connects the sublayers.
    final_norm: between the scheme's readout and the head.
  """

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    self.config = config
    self.embedding = embedding.Embedding(config, rngs=rngs)
    keys = jax.random.split(rngs.params(), config.num_layers)
    self.layers = jax.vmap(
      lambda key: layer.Layer(config, rngs=nnx.Rngs(params=key))
    )(keys)
    self.residual = residuals.build_residual(config)
    self.final_norm = norm.RMSNorm(config.width, config.norm_eps)

  def __call__(
    self, tokens_BT: jax.Array, segment_ids_BT: jax.Array | None = None
  ) -> jax.Array:
    """float32 logits [B, T, V] of the token that follows each position.

    Args:
      tokens_BT: int32 tokens, from 0 to vocab_size - 1.
      segment_ids_BT: document numbers; attention does not cross them.
    """
    return self.embedding.decode(self.hidden(tokens_BT, segment_ids_BT))

  def hidden(
    self, tokens_BT: jax.Array, segment_ids_BT: jax.Array | None = None
  ) -> jax.Array:
    """States [B, T, D] after the final norm: what the head reads."""
    h_BTD = stack.run(
      self.layers,
      self.residual,
      self.embedding.encode(tokens_BT),
      segment_ids_BT,
      scan=self.config.scan_layers,
      remat=self.config.remat,
    )
    return self.final_norm(h_BTD)

  def trace(
    self, tokens_BT: jax.Array, segment_ids_BT: jax.Array | None = None
  ) -> stack.Trace:
    """Sublayer outputs v_0..v_L and reads h_1..h_L, h_out, for analysis."""
    return stack.trace(
      self.layers,
      self.residual,
      self.embedding.encode(tokens_BT),
      segment_ids_BT,
    )


def build_model(config: config_lib.ModelConfig, seed: int = 0) -> Transformer:
  """A model with freshly drawn float32 parameters.

  All schemes draw the same embedding, layers and head from the same seed; what
  a scheme adds starts at constants.

  Raises:
    ConfigError: the config names an unknown scheme or no vocabulary.
  """
  return Transformer(config, rngs=nnx.Rngs(params=seed))
