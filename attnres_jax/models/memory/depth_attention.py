# SPDX-License-Identifier: Apache-2.0
"""Depth attention: a mixer's values attend to earlier mixers' values."""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models import norm as norm_lib
from attnres_jax.models.memory import base


class DepthAttention(base.DepthMemory):
  """Depth-Attention (arXiv:2606.05014, its code and a restatement of it).

  For each key/value head and token, over the mixers j = n, n - s, n - 2s, ...
  of the same kind:

    a = softmax_j(q_n . k_j / sqrt(H))
    V_n <- a_n V_n + sum_{j<n} a_j V_j

  where V_j is what mixer j has used, and attention over the sequence follows
  with V_n. Keys and queries have no positions, and are divided by their root
  mean square, as in the authors' networks, whose norms have gains (without,
  our choice); q_n is the mean over the queries of a head's group. There are no
  parameters. A decoder's cache holds the mixed values and is no larger.

  The state has keys and mixed values of all mixers of each kind.

  Attributes:
    stride: s; `model.depth_stride`, or half of the mixers of a kind.
  """

  kinds = ("attention", "mla")

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.stride = config.depth_stride
    self.eps = config.norm_eps

  def changes(self, l: int) -> bool:
    return self.sublayer_kinds[l] in self.kinds

  def with_heads(
    self,
    call: base.Call,
    query: Any,
    key: Any,
    value: Any,
    state: Any,
    slot: Any,
  ) -> tuple[jax.Array, Any]:
    stride = self.stride or max(1, self.sublayer_kinds.count(call.kind) // 2)
    earlier = state.get(call.kind, ())[::-1][stride - 1 :: stride]
    if earlier:
      value = self._attend(query, [(key, value), *earlier])
    return call.finish(query, key, value), {call.kind: (key, value)}

  def write(self, state: Any, new: Any) -> Any:
    grown = {kind: (*state.get(kind, ()), pair) for kind, pair in new.items()}
    return {**state, **grown}

  def _attend(self, query_BTNH: jax.Array, sources: Any) -> jax.Array:
    """The mixture of the sources' values, for each of their heads."""
    shape = sources[0][0].shape  # [B, T, K, H]
    query_BTNH = self._normed(query_BTNH)
    query_BTKGH = query_BTNH.reshape(*shape[:3], -1, shape[3])
    query_BTKH = jnp.mean(query_BTKGH, axis=3)
    scores = [
      jnp.einsum("BTKH,BTKH->BTK", query_BTKH, self._normed(key_BTKH))
      for key_BTKH, _ in sources
    ]
    weight_MBTK = jax.nn.softmax(shape[3] ** -0.5 * jnp.stack(scores), axis=0)
    mixed_BTKV = jnp.einsum(
      "MBTK,MBTKV->BTKV",
      weight_MBTK,
      jnp.stack([precision.widen(value_BTKV) for _, value_BTKV in sources]),
    )
    return mixed_BTKV.astype(sources[0][1].dtype)

  def _normed(self, x: jax.Array) -> jax.Array:
    x = precision.widen(x)
    return x * norm_lib.inverse_rms(x, self.eps)
