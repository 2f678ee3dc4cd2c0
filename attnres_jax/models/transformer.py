# SPDX-License-Identifier: Apache-2.0
"""Decoder-only transformer: embed, trunk, final norm, head."""

from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.common import draws
from attnres_jax.common import scopes
from attnres_jax.common import sharding
from attnres_jax.models import decoding
from attnres_jax.models import embedding
from attnres_jax.models import layer_stacks
from attnres_jax.models import linear
from attnres_jax.models import norm
from attnres_jax.models import residuals
from attnres_jax.models import sublayer
from attnres_jax.models import trunk
from attnres_jax.models.mixers import cache as cache_lib
from attnres_jax.models.residuals import tools


class Extended(NamedTuple):
  """What `Transformer.extend` returns.

  Attributes:
    hidden_BTD: states after the final norm, which the head reads.
    added: what `cache.append` stores.
  """

  hidden_BTD: jax.Array
  added: cache_lib.Added


class Transformer(nnx.Module):
  """A language model over tokens with any residual scheme.

  Attributes:
    config: the shape of the network.
    embedding: token vectors and output head.
    sublayers: ONE module per kind of sublayer; every leaf has a leading axis
      over the sublayers of that kind, in the order of depth. Or a
      list of modules for one sublayer each instead (`layer_stacks.separated`).
    residual: the scheme that connects the sublayers.
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
    self.final_norm = norm.optional(
      self.residual.final_norm, config.width, config.norm_eps
    )
    if config.parameter_dtype != "float32":
      linear.store([self.embedding, self.sublayers], config.parameter_dtype)

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
    return self.hidden_of(self.embedding.encode(tokens_BT), segment_ids_BT)

  def hidden_of(
    self, embedding_BTD: jax.Array, segment_ids_BT: jax.Array | None = None
  ) -> jax.Array:
    """`hidden` of the token vectors."""
    h_BTD = trunk.Trunk.of(self.config, self.residual).run(
      self.sublayers, embedding_BTD, segment_ids_BT
    )
    with scopes.part(scopes.NORM):
      return self.final_norm(h_BTD)

  def init_cache(self, batch: int, length: int) -> cache_lib.Cache:
    """An empty cache with room for `length` tokens of each row.

    Raises:
      ConfigError: a mixer cannot decode.
    """
    heads, before = scheme_while_decoding(self.config, self.residual, batch)
    states: dict[str, Any] = {}
    for kind, core in self._decoding_cores().items():
      count = self.config.sublayer_kinds.count(kind)
      cache = jax.eval_shape(
        lambda core: core.init_cache(batch, length, heads), core
      )
      states[kind] = jax.tree.map(
        lambda a, count=count: jnp.zeros((count, *a.shape), a.dtype), cache
      )
    if before:
      states[decoding.RESIDUAL] = tuple(
        jnp.zeros((1, *a.shape), a.dtype) for a in before
      )
    return cache_lib.Cache(jnp.zeros(batch, jnp.int32), states)

  def cache_specs(self) -> Any:
    """How a mesh shards the arrays of `init_cache`, in a tree like it."""
    heads, before = scheme_while_decoding(self.config, self.residual, 1)
    specs = {
      kind: core.cache_specs(heads)
      for kind, core in self._decoding_cores().items()
    }
    if before:
      specs[decoding.RESIDUAL] = (sharding.SEQUENCES,) * len(before)
    _, states = jax.eval_shape(lambda: self.init_cache(1, 1))
    state_specs: dict[str, Any] = {
      kind: jax.tree.unflatten(
        jax.tree.structure(state),
        [jax.sharding.PartitionSpec(None, *spec) for spec in specs[kind]],
      )
      for kind, state in states.items()
    }
    length: Any = sharding.SEQUENCES
    return cache_lib.Cache(length, state_specs)

  def extend(
    self,
    tokens_BT: jax.Array,
    cache: cache_lib.Cache,
    length_B: jax.Array | None = None,
    *,
    context: int | None = None,
  ) -> "Extended":
    """`hidden` of new tokens, whose earlier tokens are in a cache.

    The cache is not changed (`cache.append`). Tokens are padded on the right;
    `length_B` says how many count, by default all. `context` is at least as
    many tokens as any row has in the cache: so many are read, by default all.
    """
    if length_B is None:
      length_B = jnp.full(tokens_BT.shape[0], tokens_BT.shape[1], jnp.int32)
    chunk = cache_lib.Chunk(cache.length_B, length_B)
    with sharding.scattering(tokens_BT.shape[1]):
      h_BTD, mixers = decoding.extend(
        trunk.Trunk.of(self.config, self.residual),
        self.sublayers,
        self.embedding.encode(tokens_BT),
        cache.states,
        chunk,
        context=context,
      )
      with scopes.part(scopes.NORM):
        h_BTD = self.final_norm(h_BTD)
    return Extended(h_BTD, cache_lib.Added(chunk, mixers))

  def _decoding_cores(self) -> dict[str, Any]:
    """An abstract mixer of each kind."""
    cores = {}
    for kind in dict.fromkeys(self.config.sublayer_kinds[::2]):
      cores[kind] = sublayer.abstract_core(kind, self.config)
      if not hasattr(cores[kind], "extend"):
        config_lib.fail(
          "model.mixers",
          kind,
          "mixers with `init_cache` and `extend`, to decode",
        )
    return cores

  def trace(
    self, tokens_BT: jax.Array, segment_ids_BT: jax.Array | None = None
  ) -> trunk.Trace:
    """Sublayer outputs v_0..v_L and reads h_1..h_L, h_out, for analysis."""
    return trunk.Trunk.of(self.config, self.residual).trace(
      layer_stacks.joined(self.sublayers),
      self.embedding.encode(tokens_BT),
      segment_ids_BT,
    )


def build_model(
  config: config_lib.ModelConfig, seed: int | jax.Array = 0
) -> Transformer:
  """A model with freshly drawn parameters, in `config.parameter_dtype`.

  `seed` may be traced.

  With the same seed, all schemes draw the same embedding, layers and head,
  because the parameters of a scheme are drawn last. (A scheme may scale the
  layers, `Residual.prepare`.)

  Raises:
    ConfigError: the config has an unknown scheme or no vocabulary size.
  """
  with draws.reproducible():
    return Transformer(config, rngs=nnx.Rngs(params=draws.key(seed)))


def scheme_while_decoding(
  config: config_lib.ModelConfig, residual: residuals.Residual, batch: int
) -> tuple[bool, tuple[Any, ...]]:
  """What caches depend on, found by a look at all reads.

  Returns:
    Whether caches have the keys and values of all heads, since a scheme or
    value residuals change them separately; and for each look back of the
    scheme, the abstract tokens.
  """
  history, separate = tools.History(), []

  def run(residual: residuals.Residual, h_BTD: jax.Array) -> list[jax.Array]:
    def sublayer(l: int, carry: Any, slot: Any) -> jax.Array:
      h = residuals.base.before_norm(residual, carry, slot)
      separate.append(isinstance(h, residuals.QKV))
      return residuals.base.query_input(h)

    residual.readout(residuals.run_through(residual, h_BTD, sublayer))
    return history.later

  shape = batch, 1, config.width
  embedding = jax.ShapeDtypeStruct(shape, jnp.dtype(config.dtype))
  with history.looking_back():
    before = jax.eval_shape(run, residual, embedding)
  heads = config.value_residual or any(separate)
  return heads, tuple(before)
