# SPDX-License-Identifier: Apache-2.0
"""Full AttnRes: every sublayer attends to all earlier outputs (Eq. 1-4).

h_l is a softmax mixture of v_0, ..., v_{l-1}, and so is the readout, with its
own query. The two-phase form (Alg. 1) divides the sublayers into segments of
`schedule_size`. Phase 1 runs all queries of a segment over the values that
exist when it opens, reading them once; phase 2 merges the values that the
segment itself produces. It is exact, and only changes the schedule.
"""

from collections.abc import Sequence
from typing import Any

from flax import nnx
import jax

from attnres_jax import config as config_lib
from attnres_jax.models import norm as norm_lib
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import depth_attention
import attnres_kernels


class FullAttnResOneSoftmax(depth_attention.DepthAttention):
  """The definition: one softmax over all values per sublayer."""

  style = base.Style("Full AttnRes", "#d1478f", "^")
  headline = True
  block_size = 1

  def init(self, embedding_BTD: jax.Array) -> tuple[jax.Array, ...]:
    return (embedding_BTD.astype(self.dtype),)

  def open(self, state: Any, start: int, stop: int) -> tuple[Any, Any]:
    return state, self.queries.folded(start, stop)

  def read(self, carry: Any, slot: Any) -> jax.Array:
    return self.attend(slot, carry)

  def write(self, carry: Any, slot: Any, y_BTD: jax.Array) -> Any:
    del slot
    return (*carry, base.keep(y_BTD))

  def close(self, state: Any, carry: Any, stop: int) -> tuple[jax.Array, ...]:
    del state, stop
    return carry

  def readout(self, state: tuple[jax.Array, ...]) -> jax.Array:
    return self.attend_last(state)

  def take_apart(self, state: Any) -> tuple[tuple[jax.Array, ...], Any]:
    return state, None

  def put_together(self, blocks: tuple[jax.Array, ...], rest: Any) -> Any:
    del rest
    return blocks

  def depth_weights(self, values: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    queries_LD = self.queries.folded(0, self.num_sublayers + 1)
    return tuple(
      depth_attention.softmax_weights(query_D, values[: l + 1], self.eps)
      for l, query_D in enumerate(queries_LD)
    )

  def source_labels(self) -> tuple[tuple[str, ...], ...]:
    labels = ("embedding",) + tuple(
      f"sublayer {l + 1}" for l in range(self.num_sublayers)
    )
    return tuple(labels[: l + 1] for l in range(self.num_sublayers + 1))


class FullAttnRes(FullAttnResOneSoftmax):
  """The same function, with queries batched over segments."""

  definition = FullAttnResOneSoftmax

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.schedule_size = config.residual.schedule_size

  def segments(self) -> tuple[tuple[int, int], ...]:
    step, last = self.schedule_size, self.num_sublayers
    return tuple((i, min(i + step, last)) for i in range(0, last, step))

  def open(self, state: Any, start: int, stop: int) -> tuple[Any, Any]:
    query_QD = self.queries.folded(start, stop)
    out_QBTD, lse_QBT = depth_attention.depth_attention(
      query_QD, state, eps=self.eps
    )
    return (), depth_attention.Slot(query_QD, out_QBTD, lse_QBT)

  def read(self, carry: Any, slot: Any) -> jax.Array:
    if not carry:
      return slot.out_BTD
    if len(carry) == 1:
      return slot.merge(carry[0], self.eps)
    out_QBTD, lse_QBT = depth_attention.depth_attention(
      slot.query_D[None], carry, eps=self.eps
    )
    merged_BTD, _ = attnres_kernels.combine_mixtures(
      slot.out_BTD, slot.lse_BT, out_QBTD[0], lse_QBT[0]
    )
    return merged_BTD

  def read_normed(
    self, carry: Any, slot: Any, norm: norm_lib.RMSNorm
  ) -> jax.Array:
    if len(carry) == 1:
      return slot.merge_normed(carry[0], norm, self.eps)
    return norm(self.read(carry, slot))

  def close(self, state: Any, carry: Any, stop: int) -> tuple[jax.Array, ...]:
    del stop
    return (*state, *carry)
