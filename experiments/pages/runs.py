# SPDX-License-Identifier: Apache-2.0
"""The runs of a sweep on a page: how far they are."""

from collections.abc import Sequence
import html

from attnres_jax.sweep import monitor
from attnres_jax.sweep import state as state_lib
from experiments.pages import page

_REFRESH_SECONDS = 60
_MAX_ERROR = 200


def refresh(progress: Sequence[monitor.Progress]) -> int:
  """Seconds after which a page reloads itself: 0, never, when all is done."""
  over = all(one.status == state_lib.DONE for one in progress)
  return 0 if over else _REFRESH_SECONDS


def summary(progress: Sequence[monitor.Progress]) -> str:
  """One sentence."""
  running = sum(one.status == state_lib.RUNNING for one in progress)
  return html.escape(monitor.summary(progress, running)) + "."


def table(progress: Sequence[monitor.Progress]) -> str:
  """A line per run."""
  rows = []
  for one in progress:
    left = monitor.seconds_left(one, progress)
    error = html.escape(one.error[:_MAX_ERROR])
    rows.append(
      (
        f"<small>{html.escape(one.name)}</small>",
        one.status + (f"<small>{error}</small>" if error else ""),
        f"{one.step:,} of {one.steps:,}",
        "" if one.train_loss is None else f"{one.train_loss:.3f}",
        "" if one.validation_loss is None else f"{one.validation_loss:.4f}",
        "" if left == 0.0 else monitor.duration(left),
        str(one.attempts),
      )
    )
  header = (
    "Run", "State", "Step", "Training", "Validation", "Left", "Attempts",
  )  # fmt: skip
  return page.table(header, rows)
