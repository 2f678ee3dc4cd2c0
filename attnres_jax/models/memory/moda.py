# SPDX-License-Identifier: Apache-2.0
"""MoDA: one softmax over the sequence and over the depth of a token."""

from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models import linear
from attnres_jax.models.memory import base
from attnres_jax.models.mixers import causal_attention
from attnres_jax.models.residuals import base as residual_base


class State(NamedTuple):
  """Keys and values [B, T, K, H] of the sublayers so far.

  Attributes:
    mixers: of mixers, in the order of depth.
    mlps: of the other sublayers.
  """

  mixers: tuple[tuple[jax.Array, jax.Array], ...] = ()
  mlps: tuple[tuple[jax.Array, jax.Array], ...] = ()


class Moda(base.DepthMemory):
  """Mixture-of-depths attention (arXiv:2603.15619, by the test of its code).

  The query of token t in mixer l attends, in one softmax with one scale, to

    k_{l,s} of tokens s <= t, as usual, and k_{i,t} of sublayers i < l,

  and values likewise. MLPs have keys and values too, by an added projection.
  Its input is not in what we have read: here, it is the normalised input of the
  MLP (our choice). Distances over depth have no positions: rotary positions
  would cancel, because both are of token t.

  No fused kernel has the columns of depth, so attention runs in tiles.

  Attributes:
    kind: of the mixers, which all have the same heads.
    key: projections of the MLPs before the last mixer, [L, D, K, H].
    value: the same projections of values.
  """

  kinds = ("attention", "mla")

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    kinds = [kind for kind in self.kinds if kind in self.sublayer_kinds]
    if len(kinds) > 1:
      config_lib.fail(
        "model.depth_memory",
        config.depth_memory,
        f"'none' with mixers of several shapes, {' and '.join(kinds)}",
      )
    if config.attention_kernel not in ("auto", "tiled"):
      config_lib.fail(
        "model.attention_kernel",
        config.attention_kernel,
        f"'auto' or 'tiled' with model.depth_memory={config.depth_memory!r}",
      )
    (self.kind,) = kinds
    if self.kind == "attention":
      heads, key_width = config.kv_heads, config.head_size
      value_width = config.head_size
    else:
      heads = config.num_heads
      key_width = config.mla.nope_width + config.mla.shared_width
      value_width = config.mla.value_width
    last = max(
      l for l, kind in enumerate(self.sublayer_kinds) if kind == self.kind
    )
    matrix = linear.matrices(config.init_std, rngs)
    count = last // 2
    self.key = matrix("L|D|KH", count, config.width, heads, key_width)
    self.value = matrix("L|D|KH", count, config.width, heads, value_width)

  def init(self) -> State:
    return State()

  def changes(self, l: int) -> bool:
    if l % 2:
      return l // 2 < self.key.shape[0]
    return self.sublayer_kinds[l] == self.kind

  def call(
    self, call: base.Call, state: State, slot: Any
  ) -> tuple[jax.Array, Any]:
    if call.kind == self.kind:
      query, key, value = call.core.project(call.x)
      sources, columns = (*state.mixers, *state.mlps), None
      if sources:
        columns = _columns(query, sources)
      y_BTD = call.finish(query, key, value, columns=columns)
      return y_BTD, State(mixers=((key, value),))
    y_BTD, new, done = call.alone(), State(), len(state.mlps)
    if call.kind in self.sublayer_kinds[1::2] and done < self.key.shape[0]:
      x_BTD = residual_base.query_input(call.x)
      key = linear.linear(x_BTD, self.key[done])
      new = State(mlps=((key, linear.linear(x_BTD, self.value[done])),))
    return y_BTD, new

  def write(self, state: State, new: State) -> State:
    return State(state.mixers + new.mixers, state.mlps + new.mlps)


def _columns(query_BTNH: jax.Array, sources: Any) -> causal_attention.Columns:
  """Scores and values of a token's own depth."""
  batch, length, heads, width = query_BTNH.shape
  kv_heads = sources[0][0].shape[2]
  query_BTKGH = query_BTNH.reshape(batch, length, kv_heads, -1, width)
  logits = [
    jnp.einsum(
      "BTKGH,BTKH->BTKG", query_BTKGH, key_BTKH,
      preferred_element_type=precision.wide(query_BTNH.dtype),
    )
    for key_BTKH, _ in sources
  ]  # fmt: skip
  logits_BTKGM = width**-0.5 * jnp.stack(logits, axis=-1)
  value_BTKMV = jnp.stack([value_BTKV for _, value_BTKV in sources], axis=3)
  return causal_attention.Columns(
    logits_BTKGM.reshape(batch, length, heads, -1), value_BTKMV
  )
