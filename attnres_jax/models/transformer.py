# SPDX-License-Identifier: Apache-2.0
"""Decoder-only transformer: embed, trunk, final norm, head."""

from flax import nnx
import jax
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import scopes
from attnres_jax.models import embedding
from attnres_jax.models import memory
from attnres_jax.models import norm
from attnres_jax.models import residuals
from attnres_jax.models import stack
from attnres_jax.models import sublayer


class Transformer(nnx.Module):
  """A language model over tokens with any residual scheme.

  Attributes:
    config: the shape of the network.
    embedding: token vectors and output head.
    sublayers: ONE module per kind of sublayer; every leaf has a leading axis
      over the sublayers of that kind, in the order of depth.
    residual: the scheme that connects the sublayers.
    depth_memory: what mixers keep for later mixers.
    final_norm: between the scheme's readout and the head, in most schemes.
  """

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    self.config = config
    self.embedding = embedding.Embedding(config, rngs=rngs)
    kinds = np.asarray(config.sublayer_kinds)
    keys_L = jax.random.split(rngs.params(), config.num_sublayers)
    self.sublayers = nnx.Dict(
      {
        kind: sublayer.build_stack(kind, config, keys_L[kinds == kind])
        for kind in dict.fromkeys(config.sublayer_kinds)
      }
    )
    self.residual = residuals.build_residual(config, rngs=rngs)
    self.residual.prepare(self.sublayers)
    self.depth_memory = memory.build_memory(config, rngs=rngs)
    self.depth_memory.prepare(self.sublayers)
    self.final_norm = norm.optional(
      self.residual.final_norm, config.width, config.norm_eps
    )

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
    """States [B, T, D] after the final norm, which the head reads."""
    h_BTD = stack.run(
      self.sublayers,
      self.config.sublayer_kinds,
      self.residual,
      self.embedding.encode(tokens_BT),
      segment_ids_BT,
      memory=self.depth_memory,
      scan=self.config.scan_layers,
      remat=self.config.remat,
    )
    with scopes.part(scopes.NORM):
      return self.final_norm(h_BTD)

  def trace(
    self, tokens_BT: jax.Array, segment_ids_BT: jax.Array | None = None
  ) -> stack.Trace:
    """Sublayer outputs v_0..v_L and reads h_1..h_L, h_out, for analysis."""
    return stack.trace(
      self.sublayers,
      self.config.sublayer_kinds,
      self.residual,
      self.embedding.encode(tokens_BT),
      segment_ids_BT,
      memory=self.depth_memory,
    )


def build_model(config: config_lib.ModelConfig, seed: int = 0) -> Transformer:
  """A model with freshly drawn float32 parameters.

  With the same seed, all schemes draw the same embedding, layers and head,
  because the parameters of a scheme are drawn last. (A scheme may scale the
  layers, `Residual.prepare`.)

  Raises:
    ConfigError: the config has an unknown scheme or no vocabulary size.
  """
  return Transformer(config, rngs=nnx.Rngs(params=seed))
