# SPDX-License-Identifier: Apache-2.0
"""Full AttnRes: every sublayer attends to all earlier outputs (Eq. 1-4).

h_l is a softmax mixture of v_0, ..., v_{l-1}, and so is the readout, with its
own query. The two-phase form (Alg. 1) divides the sublayers into segments of
`schedule_size`. Phase 1 runs all queries of a segment over the values that
exist when it opens, reading them once; phase 2 merges the values that the
segment itself produces. It is exact, and only changes the schedule. The other
form, one softmax per read, is the definition (`depth_read`).
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

from flax import nnx
import jax

from attnres_jax import config as config_lib
from attnres_jax.config import fields
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import definition
from attnres_jax.models.residuals import depth_read
from attnres_jax.models.residuals import styles


@dataclasses.dataclass(frozen=True)
class Options(config_lib.DepthAttentionConfig):
  """Options of Full AttnRes.

  Attributes:
    schedule_size: sublayers that share one phase 1; affects the schedule, not
      the function.
  """

  schedule_size: fields.Execution[fields.Size] = 6


class FullAttnRes(base.Values, depth_read.DepthAttention):
  """Full AttnRes in either form.

  The carry is the values: in two phases, of the segment; with one softmax per
  read, all of them.
  """

  style = styles.Style("Full AttnRes", "#d1478f", "^")
  certainty = styles.Certainty.PAPER
  headline = True
  Options = Options

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    if self.form == "two_phase":
      self.segment_size = config.residual.schedule_size

  def open(self, state: Any, start: int, stop: int) -> tuple[Any, Any]:
    reads = self.queries.reads(start, stop)
    if not self.two_phase:
      return state, reads
    return (), self.phase_1(reads, state)

  def read(
    self, carry: Any, slot: Any, norm: base.Norm
  ) -> tuple[jax.Array | base.QKV, Any]:
    if isinstance(slot, definition.Read):
      return base.normed(self.attend(slot, carry), norm), carry
    if not carry:
      mixture = depth_read.each(slot, depth_read.mixture_of)
      return base.normed(mixture, norm), carry
    if len(carry) == 1:
      return self.merge(slot, carry[0], norm), carry
    return self.merge_several(slot, carry, norm), carry

  def close(self, state: Any, carry: Any, stop: int) -> tuple[jax.Array, ...]:
    # In two phases, the carry has the new values only.
    return (*state, *carry) if self.two_phase else carry

  def readout(self, state: tuple[jax.Array, ...]) -> jax.Array:
    return self.attend_last(state)

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
