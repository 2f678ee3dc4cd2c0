# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention (arXiv:2510.26692): a gated delta rule per channel.

A head keeps a matrix S [H, H] from keys to values. Per token, with q, k, v from
projections followed by a short causal convolution and SiLU:

  S <- diag(exp(g)) S                     decay, one rate per channel of the key
  S <- S + beta k (v - S^T k)^T           the delta rule
  y  = W_o [sigmoid(W_g x) * RMSNorm(S^T q / sqrt(H))]

In Kimi K3, W_g has full rank, and g = -5 sigmoid(exp(a) (W_f x + b)).

It needs no positions. The recurrence itself is `attnres_kernels.kda`; this
module has the projections around it.

Certain (report and released code agree): everything above; q and k of length
one; g = -exp(a) softplus(W_f x + b), with W_f and W_g of low rank and without
bias; one gain for the norms of all heads; a = log U(1, 16). Inferred: the
initial b, the inverse softplus of a log-uniform step of 0.001 to 0.1, is taken
from a public implementation, because the released code leaves it to the
checkpoint. So are the initial convolutions, uniform within 1 / sqrt(taps):
values then start large compared with the epsilon of the norm over a head, which
they would not with the standard deviation of the matrices.

I is N H, all heads side by side.
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

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
from attnres_jax.models.residuals import base
import attnres_kernels

_LENGTH_EPS = 1e-6  # Added to the squared length of queries and keys.
_RATES = (1.0, 16.0)  # Range of exp(a) at initialisation.
_STEPS = (1e-3, 1e-1)  # Range of softplus(b) at initialisation.
_LEAST_STEP = 1e-4


class KdaState(NamedTuple):
  """The state after a prefix of the sequence.

  Attributes:
    memory_BNHV: S of every head, float32.
    query_BKNH: the last inputs of the convolution of queries, oldest first;
      K is one less than its taps.
    key_BKNH: the last inputs of the convolution of keys.
    value_BKNH: the last inputs of the convolution of values.
  """

  memory_BNHV: jax.Array
  query_BKNH: jax.Array
  key_BKNH: jax.Array
  value_BKNH: jax.Array


class Kda(attention.Mixer):
  """Kimi Delta Attention with its projections, convolutions and gates."""

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    width, heads, shape = config.width, config.num_heads, config.kda
    head, rank, taps = shape.head_width, shape.gate_rank, shape.conv_width
    self.chunk_size, self.save = shape.chunk_size, shape.save
    self.decay_bound = shape.decay_bound
    self.dtype = jnp.dtype(config.dtype)
    matrix = linear.matrices(config.init_std, rngs)

    def convolution() -> nnx.Param:
      bound = taps**-0.5
      return nnx.Param(
        jax.random.uniform(
          rngs.params(), (taps, heads, head), minval=-bound, maxval=bound
        ),
        axes="WNH",
      )

    self.query = matrix("D|NH", width, heads, head)
    self.key = matrix("D|NH", width, heads, head)
    self.value = matrix("D|NH", width, heads, head)
    self.query_conv = convolution()
    self.key_conv = convolution()
    self.value_conv = convolution()
    # Small, and their errors add up in exponents.
    gate = functools.partial(matrix, exact=True)
    self.decay_down = gate("D|R", width, rank)
    self.decay_up = gate("R|NH", rank, heads, head)
    self.a_log = nnx.Param(
      _initial_a_log(rngs.params(), heads), axes="N", decays=False
    )
    self.dt_bias = nnx.Param(
      _initial_dt_bias(rngs.params(), (heads, head)), axes="NH", decays=False
    )
    self.beta = gate("D|N", width, heads)
    full_rank = shape.full_rank_gate
    self.gate = matrix("D|NH", width, heads, head) if full_rank else None
    self.gate_down = None if full_rank else gate("D|R", width, rank)
    self.gate_up = None if full_rank else gate("R|NH", rank, heads, head)
    # Queries and keys have length one anyway.
    self.value_norm = norm_lib.optional(
      config.qkv_norm, head, config.norm_eps, "H"
    )
    self.out_norm = norm_lib.RMSNorm(head, config.norm_eps, "H")
    self.output = matrix("NH|D", heads, head, width)

  def project(
    self, x: jax.Array | base.QKV
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values [B, T, N, H], before their convolutions."""
    x = base.qkv(x)
    return (
      _to_heads(x.query, self.query[...]),
      _to_heads(x.key, self.key[...]),
      _to_heads(x.value, self.value[...]),
    )

  def finish(
    self, x: jax.Array | base.QKV, query_BTNH: jax.Array, key_BTNH: jax.Array,
    value_BTNH: jax.Array, segment_ids_BT: jax.Array | None = None,
  ) -> jax.Array:  # fmt: skip
    """The output, of heads as from `project`, and gates of x."""
    x_BTD = base.qkv(x).query
    heads = query_BTNH, key_BTNH, value_BTNH
    q, k, v, g, beta = self._inputs(x_BTD, heads, (None,) * 3, segment_ids_BT)

    def mix(q, k, v, g, beta, segment_ids_BT):
      o_BTNH, _ = attnres_kernels.kda(
        q, k, v, g, beta, segment_ids=segment_ids_BT,
        chunk_size=self.chunk_size, save=self.save,
      )  # fmt: skip
      return o_BTNH

    # Heads are independent, like rows.
    in_specs = (*[sharding.HEADS] * 5, sharding.SEQUENCES)
    o_BTNH = linear.counted(
      sharding.by_shards(mix, in_specs, sharding.HEADS),
      q, k, v, g, beta, segment_ids_BT,
      part="recurrence", flops=_recurrence_flops(v.shape, self.chunk_size),
      outs=v,
    )  # fmt: skip
    return self._outputs(x_BTD, o_BTNH)

  def scale_values(self, factor: float) -> None:
    """Multiplies the weights of values and output."""
    linear.scale(factor, self.value, self.output)

  def init_cache(
    self, batch: int, length: int = 0, heads: bool = False
  ) -> KdaState:
    """The state before the first token: zeros, for any `length`."""
    taps, num_heads, head = self.query_conv[...].shape
    tail_BKNH = jnp.zeros((batch, taps - 1, num_heads, head), self.dtype)
    memory_BNHV = jnp.zeros((batch, num_heads, head, head), jnp.float32)
    return KdaState(memory_BNHV, tail_BKNH, tail_BKNH, tail_BKNH)

  def cache_specs(
    self, heads: bool = False
  ) -> tuple[jax.sharding.PartitionSpec, ...]:
    """How a mesh shards the arrays of the state."""
    return sharding.ROWS_AND_HEADS, *[sharding.HEADS] * 3

  def extend_heads(
    self, x: jax.Array | base.QKV, query_BTNH: jax.Array, key_BTNH: jax.Array,
    value_BTNH: jax.Array, state: KdaState, chunk: cache_lib.Chunk,
  ) -> tuple[jax.Array, KdaState]:  # fmt: skip
    """Continues from `state` with T >= 1 more tokens of the same sequences.

    Splitting a sequence into pieces does not change the result. One token runs
    through the recurrence, several through its chunkwise form. Padding leaves
    the state unchanged.
    """
    x_BTD, length = base.qkv(x).query, query_BTNH.shape[1]
    heads = query_BTNH, key_BTNH, value_BTNH
    q, k, v, g, beta = self._inputs(x_BTD, heads, state[1:], None)
    tails = [
      _continued(tail_BKNH, x_BTNH, chunk.length_B)
      for tail_BKNH, x_BTNH in zip(state[1:], heads, strict=True)
    ]
    counts_BTN = chunk.counts_BT(length)[..., None]
    g = jnp.where(counts_BTN[..., None], g, jnp.zeros((), g.dtype))
    beta = jnp.where(counts_BTN, beta, jnp.zeros((), beta.dtype))
    if length == 1:
      o_BNH, memory_BNHV = attnres_kernels.kda_step(
        q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state.memory_BNHV
      )
      o_BTNH = o_BNH[:, None]
    else:

      def mix(q, k, v, g, beta, memory_BNHV):
        return attnres_kernels.kda(
          q, k, v, g, beta, initial_state=memory_BNHV,
          chunk_size=self.chunk_size,
        )  # fmt: skip

      specs = *[sharding.HEADS] * 5, sharding.ROWS_AND_HEADS
      out_specs = sharding.HEADS, sharding.ROWS_AND_HEADS
      o_BTNH, memory_BNHV = sharding.by_shards(mix, specs, out_specs)(
        q, k, v, g, beta, state.memory_BNHV
      )
    return self._outputs(x_BTD, o_BTNH), KdaState(memory_BNHV, *tails)

  def _inputs(
    self, x_BTD: jax.Array, heads: tuple[jax.Array, ...],
    tails: Sequence[jax.Array | None], segment_ids_BT: jax.Array | None,
  ) -> tuple[jax.Array, ...]:  # fmt: skip
    """The arguments of the recurrence; `tails` are what is before the heads."""
    convs = self.query_conv, self.key_conv, self.value_conv
    features = [
      _feature(x_BTNH, conv[...], tail_BKNH, segment_ids_BT, unit)
      for x_BTNH, conv, tail_BKNH, unit in zip(
        heads, convs, tails, (True, True, False), strict=True
      )
    ]
    features[2] = self.value_norm(features[2])
    wide = precision.wide(x_BTD.dtype)
    low_BTR = linear.linear(x_BTD, self.decay_down[...])
    raw_BTI = _flat_product(low_BTR, self.decay_up[...], wide)
    beta_BTN = linear.linear(x_BTD, self.beta[...], 1, wide)
    g_BTI = _log_decay(
      self.decay_bound, raw_BTI, self.a_log[...], self.dt_bias[...]
    )
    g_BTNH = jnp.reshape(g_BTI, heads[0].shape)
    return *features, g_BTNH, jax.nn.sigmoid(beta_BTN)

  def _outputs(self, x_BTD: jax.Array, o_BTNH: jax.Array) -> jax.Array:
    if self.gate is not None:
      gate_BTNH = _to_heads(x_BTD, self.gate[...])
    else:
      assert self.gate_down is not None and self.gate_up is not None
      low_BTR = linear.linear(x_BTD, self.gate_down[...])
      gate_BTNH = _to_heads(low_BTR, self.gate_up[...])
    gated_BTNH = self.out_norm.gated(o_BTNH, gate_BTNH)
    return linear.output(gated_BTNH, self.output, 2, flat=True)


# Kernels read heads side by side. Left to itself, the compiler gives heads an
# axis of their own, and copies what kernels read and write.
def _flat_product(
  x_BTD: jax.Array, weight_DNH: jax.Array, dtype: Any = None
) -> jax.Array:
  """[B, T, I], one wide product."""
  return linear.linear(x_BTD, weight_DNH, 1, dtype, flat=True)


def _flat(x: jax.Array, axis: int) -> jax.Array:
  """Joins the axes from `axis` on."""
  return jnp.reshape(x, (*x.shape[:axis], -1))


def _to_heads(x_BTD: jax.Array, weight_DNH: jax.Array) -> jax.Array:
  flat = _flat_product(x_BTD, weight_DNH)
  return jnp.reshape(flat, (*flat.shape[:-1], *weight_DNH.shape[1:]))


def _feature(
  x_BTNH: jax.Array, taps_WNH: jax.Array, tail_BKNH: jax.Array | None,
  segment_ids_BT: jax.Array | None, unit: bool,
) -> jax.Array:  # fmt: skip
  """SiLU of a causal convolution; queries and keys (`unit`) get length one."""

  def feature(x_BTNH, taps_WNH, tail_BKNH, segment_ids_BT):
    return attnres_kernels.short_conv(
      x_BTNH, taps_WNH, tail=tail_BKNH, segment_ids=segment_ids_BT,
      unit_eps=_LENGTH_EPS if unit else None,
    )  # fmt: skip

  if tail_BKNH is None:  # Otherwise it is no kernel, and can be partitioned.
    heads = sharding.HEADS
    in_specs = heads, sharding.HEAD_WEIGHTS, heads, sharding.SEQUENCES
    feature = sharding.by_shards(feature, in_specs, heads)
  return linear.counted(
    feature,
    x_BTNH, taps_WNH, tail_BKNH, segment_ids_BT,
    flops=2 * taps_WNH.shape[0] * x_BTNH.size, outs=x_BTNH,
  )  # fmt: skip


def _continued(
  tail_BKNH: jax.Array, x_BTNH: jax.Array, length_B: jax.Array
) -> jax.Array:
  """As many tokens as a tail has, up to the first `length_B` of x."""
  both_BPNH = jnp.concatenate([tail_BKNH.astype(x_BTNH.dtype), x_BTNH], axis=1)
  index_BK = length_B[:, None] + jnp.arange(tail_BKNH.shape[1])[None]
  return jnp.take_along_axis(both_BPNH, index_BK[..., None, None], axis=1)


def _recurrence_flops(shape_BTNH: Sequence[int], chunk: int) -> float:
  """FLOPs of the chunkwise form; triangular products count half.

  Per head and token, with keys and values H wide and chunks of C tokens:

    6 H^2      W S, Q S and K^T V~, the products with the state
    5 C H      K K^T, Q K^T, M K, M V, (Q K^T) V~, all with triangles
    C^2 / 3    M, the inverse of a unit triangle
  """
  batch, length, heads, head = shape_BTNH
  per_head = 6 * head**2 + 5 * chunk * head + chunk**2 / 3
  return batch * length * heads * per_head


# Checkpointed, so that only the arguments are kept.
@functools.partial(jax.checkpoint, static_argnums=(0,))
def _log_decay(
  bound: float, raw_BTI: jax.Array, a_log_N: jax.Array, dt_bias_NH: jax.Array
) -> jax.Array:
  biased_BTI = raw_BTI + _flat(dt_bias_NH, 0)[None, None]
  width = dt_bias_NH.shape[1]
  rate_I = jnp.repeat(jnp.exp(a_log_N), width)
  if bound:
    return -bound * jax.nn.sigmoid(rate_I[None, None] * biased_BTI)
  return -rate_I[None, None] * jax.nn.softplus(biased_BTI)


def _initial_a_log(key: jax.Array, num_heads: int) -> jax.Array:
  low, high = _RATES
  return jnp.log(jax.random.uniform(key, (num_heads,), minval=low, maxval=high))


def _initial_dt_bias(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  low, high = jnp.log(jnp.array(_STEPS))
  step = jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high))
  step = jnp.maximum(step, _LEAST_STEP)
  return step + jnp.log(-jnp.expm1(-step))
