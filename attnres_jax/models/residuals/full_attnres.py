# SPDX-License-Identifier: Apache-2.0
"""Full AttnRes: every sublayer attends to all earlier outputs (Eq. 1-4).

h_l is a softmax mixture of v_0, ..., v_{l-1}, and so is the readout, with its
own query. The two-phase form (Alg. 1) divides the sublayers into segments of
`schedule_size`. Phase 1 runs all queries of a segment over the values that
exist when it opens, reading them once; phase 2 merges the values that the
segment itself produces. It is exact, and only changes the schedule.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.models import norm as norm_lib
from attnres_jax.models import stacks
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import depth_attention
from attnres_jax.models.residuals import depth_operators
from attnres_jax.models.residuals import depth_reads
import attnres_kernels


class FullAttnResOneSoftmax(depth_attention.DepthAttention):
  """The definition: one softmax over all values per sublayer."""

  style = base.Style("Full AttnRes", "#d1478f", "^")
  certainty = base.Certainty.PAPER
  headline = True
  can_sum = True
  block_size = 1

  def init(self, embedding_BTD: jax.Array) -> tuple[jax.Array, ...]:
    return (embedding_BTD.astype(self.dtype),)

  def open(self, state: Any, start: int, stop: int) -> tuple[Any, Any]:
    return state, self.queries.reads(start, stop)

  def read(self, carry: Any, slot: Any) -> jax.Array | base.QKV:
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
    return tuple(
      self.mean_weights(self.queries.single(l), values[: l + 1])
      for l in range(self.num_sublayers + 1)
    )

  def source_labels(self) -> tuple[tuple[str, ...], ...]:
    labels = ("embedding",) + tuple(
      f"sublayer {l + 1}" for l in range(self.num_sublayers)
    )
    return tuple(labels[: l + 1] for l in range(self.num_sublayers + 1))


class _Parts(NamedTuple):
  """A read in a loop over depth, with a leading axis of 1.

  Attributes:
    reads: its parameters.
    mixtures: of the sources of its segment, and their log-normalisers.
    more: the same of the open rows, if there are any.
  """

  reads: depth_reads.Read
  mixtures: tuple[jax.Array, jax.Array]
  more: tuple[jax.Array, ...]


class FullAttnRes(FullAttnResOneSoftmax):
  """The same function, with queries batched over segments."""

  definition = FullAttnResOneSoftmax
  banked = True

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.schedule_size = config.residual.schedule_size

  def segments(self) -> tuple[tuple[int, int], ...]:
    step, last = self.schedule_size, self.num_sublayers
    return tuple((i, min(i + step, last)) for i in range(0, last, step))

  def open(self, state: Any, start: int, stop: int) -> tuple[Any, Any]:
    return (), self.phase_1(self.queries.reads(start, stop), state)

  def num_sources(self, l: int) -> int:
    return 1 + l

  def open_rows(
    self, rest: Any, shape: tuple[int, ...], size: int
  ) -> jax.Array:
    del rest
    return jnp.zeros((size, *shape), self.dtype)

  def step(
    self,
    reads: depth_reads.Read,
    mixtures: tuple[jax.Array, jax.Array],
    open_RBTD: jax.Array,
    place: jax.Array | int,
    first: jax.Array | bool,
    sublayer: Callable[[tuple[Any, Any]], jax.Array],
    rows: depth_operators.Rows,
    norm: Any,
    sinks: None,
  ) -> tuple[jax.Array, jax.Array]:
    del first, rows, norm, sinks
    more = ()
    if len(open_RBTD) > 1:
      *more, open_RBTD = depth_operators.through_bank(
        depth_attention.queries_of(reads),
        depth_operators.Bank(open_RBTD, place),
        **self.how,
      )
    y_BTD = sublayer(((), _Parts(reads, mixtures, tuple(more))))
    return base.keep(y_BTD), open_RBTD

  def read(self, carry: Any, slot: Any) -> jax.Array | base.QKV:
    if not carry:
      return depth_reads.each(slot, self.whole)
    if len(carry) == 1:
      return self.merge(slot, carry[0])
    return self.merge_several(slot, carry)

  def read_normed(
    self, carry: Any, slot: Any, norm: norm_lib.RMSNorm
  ) -> jax.Array | base.QKV:
    if isinstance(slot, _Parts):
      # Saves the mixtures only: what follows from them costs little.
      return jax.checkpoint(self._read_parts, prevent_cse=False)(slot, norm)
    if len(carry) == 1:
      return self.merge_normed(slot, carry[0], norm)
    return super().read_normed(carry, slot, norm)

  def _read_parts(self, slot: "_Parts", norm: Any) -> jax.Array | base.QKV:
    mixtures = slot.mixtures
    if slot.more:
      mixtures = attnres_kernels.combine_mixtures(*mixtures, *slot.more)
    whole = stacks.only(self.slots_of(slot.reads, *mixtures))
    return super().read_normed((), whole, norm)

  def close(self, state: Any, carry: Any, stop: int) -> tuple[jax.Array, ...]:
    del stop
    return (*state, *carry)

  def for_few_tokens(self) -> base.Residual:
    return depth_attention.sharing(self, FullAttnResOfFewTokens)


class FullAttnResOfFewTokens(
  depth_attention.OfFewTokens, FullAttnResOneSoftmax
):
  """The same function, with a read and its norm in one operation."""

  definition = FullAttnResOneSoftmax

  def sources(self, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return state
