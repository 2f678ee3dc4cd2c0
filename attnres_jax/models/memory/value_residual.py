# SPDX-License-Identifier: Apache-2.0
"""Value residuals: later mixers use the values of the first one.

From arXiv:2410.17897 and its code. Values are those after the projection; in
KDA, before the short convolution. In a network with mixers of several kinds,
each kind has its own first mixer (our choice).
"""

from collections.abc import Mapping
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models import linear
from attnres_jax.models import norm as norm_lib
from attnres_jax.models.memory import base
from attnres_jax.models.residuals import base as residual_base


class ValueResidual(base.DepthMemory):
  """ResFormer: V_n <- (V_1 + V_n) / 2 from the second mixer on.

  The state has V_1 [B, T, K, H] of each kind.
  """

  kinds = ("attention", "mla", "kda")

  def changes(self, l: int) -> bool:
    kind = self.sublayer_kinds[l]
    return kind in self.kinds and kind not in self.sublayer_kinds[:l]

  def with_heads(
    self,
    call: base.Call,
    query: Any,
    key: Any,
    value: Any,
    state: Any,
    slot: Any,
  ) -> tuple[jax.Array, Any]:
    if call.kind in state:
      value, new = self.mix(state[call.kind], value, slot), {}
    else:
      new = {call.kind: value}
    return call.finish(query, key, value), new

  def mix(self, first: jax.Array, value: jax.Array, slot: Any) -> jax.Array:
    """V_n, of V_1 and the mixer's own values."""
    total = precision.widen(first) + precision.widen(value)
    return (0.5 * total).astype(value.dtype)


class LearnedValueResidual(ValueResidual):
  """ResFormer with V_n <- a_n V_1 + b_n V_n, both from 1/2 (recalled).

  Attributes:
    weight: (a_n, b_n) of all mixers but the first of each kind. No decay: zero
      would silence them.
  """

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    count = sum(map(self._mixes, range(len(self.sublayer_kinds))))
    weight = jnp.full((count, 2), 0.5, jnp.float32)
    self.weight = nnx.Param(weight, axes="LM", decays=False)

  def open(self, start: int, stop: int) -> jax.Array:
    # Other sublayers have a row as well, which they do not use.
    rows = np.cumsum([0, *map(self._mixes, range(stop - 1))])[start:]
    return self.weight[np.minimum(rows, self.weight.shape[0] - 1)]

  def mix(self, first: jax.Array, value: jax.Array, slot: Any) -> jax.Array:
    mixed = slot[0] * precision.widen(first) + slot[1] * precision.widen(value)
    return mixed.astype(value.dtype)

  def _mixes(self, l: int) -> bool:
    return self.sublayer_kinds[l] in self.kinds and not self.changes(l)


class SvFormer(ValueResidual):
  """SVFormer: V_n = V_1, so that only the first mixer projects values.

  Attributes:
    value: the projection of the first mixer.
    value_norm: the norm after it, if mixers have one.
  """

  kinds = ("attention",)

  def prepare(self, sublayers: Mapping[str, Any]) -> None:
    core = sublayers["attention"].core
    self.value = nnx.Param(core.value[0], axes="D|KH")
    self.value_norm = jax.tree.map(lambda a: a[0], core.value_norm)
    core.value, core.value_norm = None, norm_lib.Identity()

  def with_heads(
    self,
    call: base.Call,
    query: Any,
    key: Any,
    value: Any,
    state: Any,
    slot: Any,
  ) -> tuple[jax.Array, Any]:
    new = {}
    if call.kind not in state:
      x_BTD = residual_base.qkv(call.x).value
      projected = linear.linear(x_BTD, self.value[...])
      new[call.kind] = self.value_norm(projected)
    return call.finish(query, key, (state | new)[call.kind]), new
