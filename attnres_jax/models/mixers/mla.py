# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (arXiv:2510.26692, section 4; arXiv:2412.19437).

Keys and values of all heads are computed from one latent vector per token, and
all heads share another part of the key:

  q = W_q x                 per head, [own part | shared part]
  [c | r] = W_a x           c <- RMSNorm(c)
  [k | v] = W_b c           per head; its key is [k | r]
  y = W_o softmax(q . [k | r] / sqrt(width of q), causal) v

It has no positions, because the other mixers handle them. In Kimi K3, queries
come from a separate latent, W_q RMSNorm(W_d x), and heads are multiplied by
sigmoid(W_g x) before W_o. A cache holds c and r: R + 64 numbers per token.
Decoding never computes keys and values.
With W_b = [U_k | U_v], a score is (U_k^T q) . c + q_shared . r, and U_v is
applied after the softmax, so that all heads attend over the cache itself
("absorbed").

Certain: all of this, from the report and the released code. Inferred: the
epsilon of the latent's norm, which is the default of the class in that code.
"""

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.common import sharding
from attnres_jax.models import linear
from attnres_jax.models import norm as norm_lib
from attnres_jax.models.mixers import attention
from attnres_jax.models.mixers import cache as cache_lib
from attnres_jax.models.mixers import causal_attention
from attnres_jax.models.residuals import base


class Mla(attention.SoftmaxMixer):
  """Multi-head latent attention, without positions."""

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    width, heads, shape = config.width, config.num_heads, config.mla
    self.nope_width = shape.nope_width
    self.latent_rank = shape.latent_rank
    self.kernel = config.attention_kernel
    self.dtype = jnp.dtype(config.dtype)
    matrix = linear.matrices(config.init_std, rngs)

    head = shape.nope_width + shape.shared_width
    rank = shape.query_rank
    self.query_down = matrix("D|R", width, rank) if rank else None
    self.query_latent_norm = norm_lib.optional(
      bool(rank), rank, shape.latent_eps, "R"
    )
    self.query = matrix("R|NH" if rank else "D|NH", rank or width, heads, head)
    self.compress = matrix("D|R", width, shape.latent_rank + shape.shared_width)
    self.latent_norm = norm_lib.RMSNorm(
      shape.latent_rank, shape.latent_eps, "R"
    )
    self.expand = matrix(
      "R|NH", shape.latent_rank, heads, shape.nope_width + shape.value_width
    )
    self.output = matrix("NH|D", heads, shape.value_width, width)
    gated = shape.output_gate
    self.gate = (
      matrix("D|NH", width, heads, shape.value_width) if gated else None
    )
    # The rest of keys, and values, come from a normalised latent.
    self.query_norm, self.shared_norm = (
      norm_lib.optional(config.qkv_norm, n, config.norm_eps, "H")
      for n in (head, shape.shared_width)
    )

  def project(
    self, x: jax.Array | base.QKV
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys [B, T, N, H], values [B, T, N, V].

    With a separate input for values, there are two latents, of which one gives
    the keys and one the values (our choice).
    """
    x = base.qkv(x)
    keys = values = self._compressed(x.key)
    if x.value is not x.key:
      values = self._compressed(x.value)
    return self._heads(x.query, keys, values)

  def scale_values(self, factor: float) -> None:
    """Multiplies the weights of values and output."""
    expand, values = self.expand[...], slice(self.nope_width, None)
    self.expand[...] = expand.at[..., values].multiply(factor)
    linear.scale(factor, self.output)

  def scale_logits(self, factor_N: jax.Array) -> None:
    """Multiplies the weights of queries and keys, by the factor together."""
    query_DNH, expand_RNH = self.query[...], self.expand[...]
    factor_N1, root_N1 = factor_N[:, None], jnp.sqrt(factor_N)[:, None]
    is_nope_H = jnp.arange(query_DNH.shape[2]) < self.nope_width
    # All heads share the rest of the key.
    scale_NH = jnp.where(is_nope_H[None], root_N1, factor_N1)
    self.query[...] = query_DNH * scale_NH[None]
    is_key_H = jnp.arange(expand_RNH.shape[2]) < self.nope_width
    scale_NH = jnp.where(is_key_H[None], root_N1, 1.0)
    self.expand[...] = expand_RNH * scale_NH[None]

  def init_cache(
    self, batch: int, length: int, heads: bool = False
  ) -> cache_lib.Tokens:
    """Latents of `length` tokens per row: zeros.

    With `heads`, keys and values of all heads, for `extend_heads`, or if their
    inputs differ.
    """
    nope, shared = self.nope_width, self._shared_width
    num_heads, value = self.output[...].shape[:2]
    shapes = [(1, self.latent_rank + shared)]
    if heads:
      shapes = [(num_heads, nope + shared), (num_heads, value)]
    return cache_lib.Tokens(
      tuple(
        jnp.zeros((batch, n, length, width), self.dtype) for n, width in shapes
      )
    )

  def cache_specs(
    self, heads: bool = False
  ) -> tuple[jax.sharding.PartitionSpec, ...]:
    """How a mesh shards the arrays of the cache; all heads need all latents."""
    return (sharding.ROWS_AND_HEADS,) * 2 if heads else (sharding.SEQUENCES,)

  def extend(
    self,
    x: jax.Array | base.QKV,
    cache: cache_lib.Tokens | cache_lib.Open,
    chunk: cache_lib.Chunk,
  ) -> tuple[jax.Array, cache_lib.Tokens | cache_lib.Stored]:
    """The output of new tokens, and what the cache should add.

    First tokens are in expanded form, as in training, later ones in absorbed
    form.
    """
    if len(cache.arrays) == 2:
      return self.extend_heads(x, *self.project(x), cache, chunk)
    if isinstance(x, base.QKV):
      raise ValueError("inputs that differ need init_cache(heads=True)")
    x_BTD = x
    tokens_BTC = self._compressed(x_BTD)
    new = cache_lib.Tokens((tokens_BTC[:, None].astype(self.dtype),))
    before, added = cache_lib.opened(cache, new, chunk)
    if not before.room:
      heads = self._heads(x_BTD, tokens_BTC, tokens_BTC)
      return self.finish(x_BTD, *heads), added
    key_up_RNH, value_up_RNV = jnp.split(
      self.expand[...].astype(x_BTD.dtype), [self.nope_width], axis=2
    )
    query_BTNH = self._queries(x_BTD)
    nope_BTNH, shared_BTNH = jnp.split(query_BTNH, [self.nope_width], axis=3)
    absorbed_BTNR = jnp.einsum(
      "BTNH,RNH->BTNR", nope_BTNH, key_up_RNH,
      preferred_element_type=jnp.float32,
    ).astype(x_BTD.dtype)  # fmt: skip
    # The shared key is mixed as well, which is cheaper than a copy without it.
    mixed_BTNC = causal_attention.attend_after(
      jnp.concatenate([absorbed_BTNR, shared_BTNH], axis=3),
      before,
      new,
      chunk,
      query_BTNH.shape[-1] ** -0.5,
    )
    mixed_BTNV = jnp.einsum(
      "BTNR,RNV->BTNV", mixed_BTNC[..., : self.latent_rank], value_up_RNV,
      preferred_element_type=jnp.float32,
    ).astype(x_BTD.dtype)  # fmt: skip
    return self.outputs(x_BTD, mixed_BTNV), added

  def outputs(
    self, x: jax.Array | base.QKV, mixed_BTNV: jax.Array
  ) -> jax.Array:
    if self.gate is not None:
      gate_BTNV = linear.linear(base.qkv(x).query, self.gate[...])
      mixed_BTNV = _gated(mixed_BTNV, gate_BTNV)
    return linear.output(mixed_BTNV, self.output, 2)

  @property
  def _shared_width(self) -> int:
    return self.compress[...].shape[1] - self.latent_rank

  def _compressed(self, x_BTD: jax.Array) -> jax.Array:
    """Normalised latents and shared keys, concatenated."""
    latent_BTR, shared_BTH = jnp.split(
      linear.linear(x_BTD, self.compress[...]), [self.latent_rank], axis=2
    )
    # Checkpointed, so that nothing is kept in float32.
    norm = jax.checkpoint(lambda norm, latent_BTR: norm(latent_BTR))
    latent_BTR = norm(self.latent_norm, latent_BTR)
    return jnp.concatenate([latent_BTR, self.shared_norm(shared_BTH)], axis=2)

  def _queries(self, x_BTD: jax.Array) -> jax.Array:
    if self.query_down is not None:
      latent_BTR = linear.linear(x_BTD, self.query_down[...])
      x_BTD = jax.checkpoint(lambda norm, x: norm(x))(
        self.query_latent_norm, latent_BTR
      )
    return self.query_norm(linear.linear(x_BTD, self.query[...]))

  def _heads(
    self, x_BTD: jax.Array, keys_BTC: jax.Array, values_BTC: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    shared_BTH = keys_BTC[:, :, self.latent_rank :]
    nope_BTNH, value_BTNV = self._up(keys_BTC)
    if values_BTC is not keys_BTC:
      _, value_BTNV = self._up(values_BTC)
    shared_BTNH = jnp.broadcast_to(
      shared_BTH[:, :, None], (*nope_BTNH.shape[:3], shared_BTH.shape[2])
    )
    query_BTNH = self._queries(x_BTD)
    key_BTNH = jnp.concatenate([nope_BTNH, shared_BTNH], axis=3)
    return query_BTNH, key_BTNH, value_BTNV

  def _up(self, tokens_BTC: jax.Array) -> list[jax.Array]:
    """The separate part of each head's key, and its value, from latents."""
    latent_BTR = tokens_BTC[:, :, : self.latent_rank]
    expanded = linear.linear(latent_BTR, self.expand[...])
    return jnp.split(expanded, [self.nope_width], axis=3)


# Checkpointed, so that nothing is kept in float32.
@jax.checkpoint
def _gated(mixed_BTNV: jax.Array, gate_BTNV: jax.Array) -> jax.Array:
  gate_BTNV = jax.nn.sigmoid(precision.widen(gate_BTNV))
  gated_BTNV = gate_BTNV * precision.widen(mixed_BTNV)
  return gated_BTNV.astype(mixed_BTNV.dtype)
