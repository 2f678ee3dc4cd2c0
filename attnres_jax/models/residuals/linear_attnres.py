# SPDX-License-Identifier: Apache-2.0
"""Linear attention over depth: depth attention in a state of constant size.

  h_l = sum_i <q_l, k_i> v_i / sum_i <q_l, k_i>
  q_l = phi(w_l), k_i = phi(K_i RMSNorm(v_i)), phi = elu + 1, of R entries

The paper calls depth attention with a factored kernel a future direction
(arXiv:2603.15031, section 6.2) and specifies nothing; all here is our choice,
after linear attention over time (arXiv:2006.16236). A key belongs to the
sublayer that writes the value, as a query does to the one that reads, so that
R streams and their R weights are enough:

  S <- S + k_i v_i^T,  z <- z + k_i;  h_l = q_l^T S / q_l^T z
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models.residuals import base


class State(NamedTuple):
  """S and z, float32."""

  streams_RBTD: jax.Array
  weights_RBT: jax.Array


class KernelSlot(NamedTuple):
  """q of the sublayer's read, and K of its output."""

  query_R: jax.Array
  key_RD: jax.Array


class LinearAttnRes(base.Residual):
  """The recurrence, which scans.

  With K = 0, its start, all weights are equal and the network is PreNorm's
  function. Queries start random, N(0, 1), because equal ones would keep the R
  entries equal. M_{i->l} = <q_l, k_i> / sum_j <q_l, k_j>, an R-semiseparable
  matrix for each token. State (D + 1) R, parameters (D + 1) R per sublayer,
  with R = `streams`.
  """

  style = base.Style("Linear AttnRes", "#d1478f", "<", (0, (1, 1.5)))
  certainty = base.Certainty.OURS
  takes = ("streams",)

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.eps = config.norm_eps
    shape = config.num_sublayers + 1, config.residual.streams
    drawn = jax.random.normal(rngs.params(), shape, jnp.float32)
    # No decay: it would pull queries together and weights to their mean.
    self.query = base.parameter("LR", drawn, decays=False)
    self.key = base.parameter("LRD", 0, *shape, config.width, decays=False)

  def init(self, embedding_BTD: jax.Array) -> State:
    value_BTD = self.widened(embedding_BTD)
    key_RBT = self._key(self.key[0], value_BTD)
    return State(key_RBT[..., None] * value_BTD[None], key_RBT)

  def open(self, state: State, start: int, stop: int) -> tuple[Any, Any]:
    query_QR = _phi(self.query[start:stop])
    return state, KernelSlot(query_QR, self.key[start + 1 : stop + 1])

  def input(self, carry: State, slot: KernelSlot) -> jax.Array:
    return self._read(carry, slot.query_R)

  def write(self, carry: State, slot: KernelSlot, y_BTD: jax.Array) -> State:
    # Keeping the output is enough: R streams are sums of outputs.
    value_BTD = precision.widen(base.save(y_BTD))
    key_RBT = self._key(slot.key_RD, value_BTD)
    streams_RBTD = carry.streams_RBTD + key_RBT[..., None] * value_BTD[None]
    return State(streams_RBTD, carry.weights_RBT + key_RBT)

  def readout(self, state: State) -> jax.Array:
    return self._read(state, _phi(self.query[-1]))

  def depth_weights(self, values: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    keys_MRBT = jnp.stack([
      self._key(key_RD, precision.widen(value_BTD))
      for key_RD, value_BTD in zip(self.key[...], values, strict=True)
    ])  # fmt: skip
    weights = []
    for l, query_R in enumerate(_phi(self.query[...])):
      product_MBT = jnp.einsum("R,MRBT->MBT", query_R, keys_MRBT[: l + 1])
      weights.append(product_MBT / jnp.sum(product_MBT, axis=0, keepdims=True))
    return tuple(weights)

  def source_labels(self) -> tuple[tuple[str, ...], ...]:
    names = [f"sublayer {l + 1}" for l in range(self.num_sublayers)]
    labels = ("embedding", *names)
    return tuple(labels[: l + 1] for l in range(len(labels)))

  def _read(self, state: State, query_R: jax.Array) -> jax.Array:
    mixture = jnp.einsum("R,RBTD->BTD", query_R, state.streams_RBTD)
    total_BT = jnp.einsum("R,RBT->BT", query_R, state.weights_RBT)
    share_BT = base.coefficient(1 / total_BT)
    return (mixture * share_BT[..., None]).astype(self.dtype)

  def _key(self, key_RD: jax.Array, value_BTD: jax.Array) -> jax.Array:
    """phi(K RMSNorm(v)), [R, B, T]."""
    mean_square = jnp.mean(jnp.square(value_BTD), axis=-1, keepdims=True)
    normed_BTD = value_BTD * jax.lax.rsqrt(mean_square + self.eps)
    return base.coefficient(_phi(jnp.einsum("RD,BTD->RBT", key_RD, normed_BTD)))


def _phi(x: jax.Array) -> jax.Array:
  return jax.nn.elu(x) + 1
