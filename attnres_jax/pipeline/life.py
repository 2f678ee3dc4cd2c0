# SPDX-License-Identifier: Apache-2.0
"""The path of one microbatch through a pipeline, as text (paper, Fig. 3)."""

from collections.abc import Iterable

import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.common import text_table
from attnres_jax.pipeline import schedule as schedule_lib

_HEADER = ("unit", "tick", "rank", "arrives", "looks up", "makes", "sends")


def life_text(
  schedule: schedule_lib.Schedule, microbatch: int, *, rule: str = "minimum"
) -> str:
  """A row per unit, in the order in which they run.

  `b2@5` is block 2, in slot 5 of the rank's pool, and `p` the running sum of an
  open block; `db2` and `dp` are their gradients. The forward pass looks up what
  the rank has from earlier chunks; a block that is computed and sent without a
  slot is not kept. The backward pass looks up everything that the chunk has
  read, and gradients that wait on the rank (`db2@1`, of another pool). It
  completes the gradients of the chunk's blocks.

  Args:
    schedule: when each unit runs.
    microbatch: which one.
    rule: one of `layout.RULES`.

  Raises:
    ValueError: there is no such microbatch.
  """
  if not 0 <= microbatch < schedule.num_microbatches:
    config_lib.fail_argument(
      "microbatch", microbatch, f"0 to {schedule.num_microbatches - 1}"
    )
  layout = schedule.layout
  blocks, gradients = (
    schedule.slot_pool(kind, rule=rule).slots[:, microbatch]
    for kind in ("blocks", "gradients")
  )

  def named(letters: str, slots: np.ndarray, numbers: Iterable[int]):
    return [
      f"{letters}{b}" + (f"@{slots[b]}" if slots[b] >= 0 else "")
      for b in numbers
    ]

  def sent(chunk: int, prefix: str = "") -> list[str]:
    carries = layout.has_partial(chunk) if chunk < layout.num_chunks else False
    numbers = layout.window(chunk, rule)
    return [f"{prefix}b{b}" for b in numbers] + [f"{prefix}p"] * carries

  def forward(chunk: int) -> list[list[str]]:
    own, window = blocks[chunk], layout.window(chunk, rule)
    arrived = named("b", own, window) + ["p"] * layout.has_partial(chunk)
    earlier = [b for b in layout.reads(chunk) if b not in window]
    made = named("b", own, layout.produced(chunk))
    return [arrived, named("b", own, earlier), made, sent(chunk + 1)]

  def backward(chunk: int) -> list[list[str]]:
    waiting = sorted(layout.held(chunk, rule))
    found = named("b", blocks[chunk], layout.reads(chunk))
    found += named("db", gradients[chunk], waiting)
    made = [f"db{b}" for b in layout.produced(chunk)]
    return [sent(chunk + 1, "d"), found, made, sent(chunk, "d")]

  rows = [list(_HEADER)]
  for letter, ticks, cells in (
    ("F", schedule.forward_ticks, forward),
    ("B", schedule.backward_ticks, backward),
  ):
    units = list(enumerate(ticks[:, microbatch].tolist()))
    for chunk, tick in sorted(units, key=lambda unit: unit[1]):
      unit = f"{letter}{layout.virtual_stage(chunk)}.{microbatch}"
      words = [" ".join(cell) or "-" for cell in cells(chunk)]
      rows.append([unit, str(tick), str(layout.rank(chunk)), *words])
  return text_table.columns(rows)
