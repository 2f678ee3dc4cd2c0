# SPDX-License-Identifier: Apache-2.0
"""Planned transfers and bubbles, without a device."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from attnres_jax.pipeline import layout as layout_lib
from experiments.pipeline_cost import orders

Row = dict[str, Any]


class Shape(NamedTuple):
  """P ranks, V virtual stages each, K chunks per block."""

  ranks: int
  virtual_stages: int
  chunks_per_block: int

  @property
  def layout(self) -> layout_lib.Layout:
    """A layout with one sublayer per chunk."""
    return layout_lib.Layout(*self[:2], 1, self.chunks_per_block)

  def row(self) -> Row:
    return dict(zip("PVK", self))


# The second is Fig. 3.
SHAPES = tuple(
  Shape(*shape)
  for shape in ((4, 2, 1), (4, 2, 2), (4, 4, 1), (8, 4, 1), (8, 4, 2))
)
FIG_3 = SHAPES[1]
ONE_STAGE = (Shape(4, 1, 1), Shape(8, 1, 2))

_CLOSED_FORMS = {
  "naive": layout_lib.naive_total,
  "cached": layout_lib.cached_total,
  "minimum": layout_lib.minimum_total,
}
_BACKWARD_TIME = 2.0


def transfers() -> Iterator[Row]:
  """A row per shape and rule: vectors per microbatch, forward.

  `closed_form` is Eq. 7, Eq. 8 and that of the minimum, for blocks that
  complete at an even pace; `planned` counts whole blocks, without and with the
  embedding. `carried` is what the links of a lockstep program carry, with
  padding.
  """
  for shape in (*SHAPES, *ONE_STAGE):
    layout = shape.layout
    for rule in layout_lib.RULES:
      blocks_of_chunk = 1 / shape.chunks_per_block
      closed = _CLOSED_FORMS[rule](*shape[:2], blocks_of_chunk)
      yield shape.row() | dict(
        rule=rule,
        closed_form=closed,
        planned_without_embedding=layout.total_vectors(rule, embedding=False),
        planned=layout.total_vectors(rule),
        partials=layout.total_partials(),
        peak=layout.peak_vectors(rule),
        carried=shape.virtual_stages * sum(layout.link_vectors(rule)),
        carried_partials=shape.virtual_stages * sum(layout.link_partials()),
      )


def bubbles() -> Iterator[Row]:
  """A row per order, shape and kind of clock.

  Backward takes twice as long as forward. `bubble` is computed from the start
  times of all units; `closed_form` is the ideal, (P - 1) / (V M).
  """
  for ranks, stages, microbatches in (
    (4, 1, 16), (4, 2, 16), (4, 4, 16), (8, 1, 32), (8, 2, 32), (8, 4, 32),
  ):  # fmt: skip
    layout = Shape(ranks, stages, stages).layout
    for order, make in orders.ORDERS.items():
      schedule = make(layout, microbatches)
      units = [schedule.peaks(rank).units for rank in range(ranks)]
      work = stages * microbatches * (1.0 + _BACKWARD_TIME)
      for clock, total in (
        ("lockstep", schedule.total_time(1.0, _BACKWARD_TIME)),
        ("free", orders.free_time(schedule, 1.0, _BACKWARD_TIME)),
      ):
        yield dict(
          P=ranks,
          V=stages,
          M=microbatches,
          order=order,
          clock=clock,
          ticks=schedule.num_ticks,
          bubble=round(total / work - 1, 6),
          closed_form=round((ranks - 1) / (stages * microbatches), 6),
          units_in_flight=max(units),
        )
