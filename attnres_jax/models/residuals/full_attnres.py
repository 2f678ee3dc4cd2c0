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
from typing import Any, NamedTuple

from flax import nnx
import jax

from attnres_jax import config as config_lib
from attnres_jax.config import fields
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import depth_read
from attnres_jax.models.residuals import styles
from attnres_jax.models.residuals import tools


@dataclasses.dataclass(frozen=True)
class Options(config_lib.DepthAttentionConfig):
  """Options of Full AttnRes.

  Attributes:
    schedule_size: sublayers that share one phase 1; affects the schedule, not
      the function.
  """

  schedule_size: fields.Execution[fields.Size] = 6


class Carry(NamedTuple):
  """Values before a segment, if its reads need them, and values of it."""

  earlier: tuple[jax.Array, ...]
  opened: tuple[jax.Array, ...]


class FullAttnRes(tools.Values, depth_read.DepthAttention):
  """Full AttnRes in either form.

  The carry is the segment's values, and earlier ones if the reader needs them
  again.
  """

  style = styles.Style("Full AttnRes", "#d1478f", "^")
  certainty = styles.Certainty.PAPER
  headline = True
  Options = Options
  norm_apart = False

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    if self.form == "two_phase":
      self.segment_size = config.residual.schedule_size

  def open(self, state: Any, start: int, stop: int) -> tuple[Any, Any]:
    earlier, slots = self.reader.open(self.queries.reads(start, stop), state)
    return Carry(earlier, ()), slots

  def read(
    self, carry: Any, slot: Any, norm: base.Norm
  ) -> tuple[jax.Array | base.QKV, Any]:
    h = self.reader.read(slot, carry.earlier, carry.opened, norm)
    return h, carry

  def write(self, carry: Any, slot: Any, y_BTD: jax.Array) -> Any:
    return Carry(carry.earlier, super().write(carry.opened, slot, y_BTD))

  def close(self, state: Any, carry: Any, stop: int) -> tuple[jax.Array, ...]:
    return (*state, *carry.opened)

  def readout(self, state: tuple[jax.Array, ...]) -> jax.Array:
    return self.attend_last(state)

  def depth_weights(self, values: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(
      self.mean_weights(l, values[: l + 1])
      for l in range(self.num_sublayers + 1)
    )

  def source_labels(self) -> tuple[tuple[str, ...], ...]:
    labels = ("embedding",) + tuple(
      f"sublayer {l + 1}" for l in range(self.num_sublayers)
    )
    return tuple(labels[: l + 1] for l in range(self.num_sublayers + 1))
