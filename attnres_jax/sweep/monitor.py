# SPDX-License-Identifier: Apache-2.0
"""The progress of the runs of a sweep, and the time they still need.

Everything is read from the files of the runs, so it can be queried anywhere and
at any time, whichever launcher is running.
"""

from collections.abc import Mapping, Sequence
from concurrent import futures
import dataclasses
import math
from typing import Any

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax.common import files
from attnres_jax.common import stores
from attnres_jax.common import text_table
from attnres_jax.scaling import grid
from attnres_jax.sweep import damage
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import rows as rows_lib
from attnres_jax.sweep import state as state_lib
from attnres_jax.train import account
from attnres_jax.train import claims
from attnres_jax.train import goodput as goodput_lib
from attnres_jax.train import metrics

# A run whose state is `running` but that no worker holds.
INTERRUPTED = "interrupted"
_REQUESTS = 16  # At a time, to an object store.


@dataclasses.dataclass(frozen=True)
class Progress:
  """The progress of one run.

  Attributes:
    name: of the run.
    status: one of `state`, or "interrupted". A run with an unreadable file is
      "damaged", and nothing else about it is known.
    error: of the last attempt, or what is damaged.
    residual: its scheme.
    step: the last one logged.
    steps: of the whole run.
    train_loss: the last one, in nats per token.
    validation_loss: the last one, in the same unit.
    step_seconds: of the last row; None before the first.
    seconds: of all its attempts.
    chip_hours: of all its attempts, from claim to release.
    tokens: on which it was trained so far.
    all_tokens: of the whole run.
    attempts: number of workers that have claimed the run.
    goodput: how the time was spent, where it is recorded.
    row: its line of a table of results, once it is done.
    curve: steps and training losses so far; nan where a step was skipped.
    run: its description; None if that is damaged.
  """

  name: str
  status: str
  error: str = ""
  residual: str = ""
  step: int = 0
  steps: int = 0
  train_loss: float | None = None
  validation_loss: float | None = None
  step_seconds: float | None = None
  seconds: float = 0.0
  chip_hours: float = 0.0
  tokens: int = 0
  all_tokens: int = 0
  attempts: int = 0
  goodput: goodput_lib.Goodput = goodput_lib.Goodput()
  row: Mapping[str, Any] | None = None
  curve: tuple[tuple[int, float], ...] = ()
  run: grid.Run | None = None


def of_run(folder: epath.PathLike, name: str, full: bool = True) -> Progress:
  """Progress of one run of a sweep's folder.

  In full, all of its metrics are read, for `goodput`, `row` and `curve`;
  otherwise the end of the file is read, and these are empty.

  Raises:
    OSError: a store cannot be reached.
  """
  workdir = epath.Path(folder) / name
  state = state_lib.read(workdir)
  if state.status == state_lib.DAMAGED:
    return Progress(name, state.status, state.error)
  try:
    return _of_run(folder, folder_lib.read_run(folder, name), state, full)
  except stores.AccessError:
    raise
  except config_lib.ConfigError as error:
    return Progress(name, state_lib.DAMAGED, str(error))


def _of_run(
  folder: epath.PathLike, run: grid.Run, state: state_lib.State, full: bool
) -> Progress:
  workdir = epath.Path(folder) / run.name
  config = folder_lib.run_config(run)
  status, row, curve = state.status, None, ()
  spent = goodput_lib.Goodput()
  with damage.of_file(workdir / "metrics.jsonl"):
    if status == state_lib.RUNNING and not claims.is_held(workdir):
      status = INTERRUPTED
    if full:
      rows = metrics.read_rows(workdir)
      spent = goodput_lib.of_rows(rows)
      train = [row for row in rows if row["split"] == "train"]
      losses = [_loss(r) for r in train]
      curve = tuple(
        (r["step"], math.nan if loss is None else loss)
        for r, loss in zip(train, losses)
      )
      ends = {r["split"]: r for r in rows}
    else:
      rows, ends = [], metrics.last_rows(workdir)
    last = ends.get("train", {})
    newest = dict(
      step=last.get("step", 0),
      train_loss=_loss(last),
      validation_loss=_loss(ends.get("validation", {})),
      step_seconds=float(last["step_seconds"]) if last else None,
    )
    if status == state_lib.DONE and not ends:
      raise ValueError("no row in a finished run")
  if status == state_lib.DONE:
    if full:
      row = rows_lib.of_run(folder, run, state, rows)
    else:
      rows_lib.check(workdir)
  return Progress(
    name=run.name,
    status=status,
    error=state.error,
    residual=config.model.residual.name,
    steps=config.train.steps,
    seconds=state.seconds,
    chip_hours=state.chip_seconds / 3600,
    tokens=account.tokens_of(config, last.get("step", 0)),
    all_tokens=account.tokens_of(config),
    attempts=state.attempts,
    goodput=spent,
    row=row,
    curve=curve,
    run=run,
    **newest,
  )


def of_folder(folder: epath.PathLike, full: bool = True) -> list[Progress]:
  """Progress of every run, in the order of the sweep; see `of_run`."""
  names = folder_lib.names(folder)
  if not files.is_remote(folder):
    return [of_run(folder, name, full) for name in names]
  with futures.ThreadPoolExecutor(_REQUESTS) as pool:
    return list(pool.map(lambda name: of_run(folder, name, full), names))


def rows(progress: Sequence[Progress]) -> list[Mapping[str, Any]]:
  """A row for every run that is done, in the order of the sweep."""
  return [run.row for run in progress if run.row is not None]


def seconds_left(progress: Progress) -> float | None:
  """Estimate for one run, by its own steps; None before it has logged one.

  Compiling, evaluating and saving come on top.
  """
  if progress.status in (state_lib.DONE, state_lib.DIVERGED, state_lib.DAMAGED):
    return 0.0
  if progress.step_seconds is None:
    return None
  return (progress.steps - progress.step) * progress.step_seconds


def total_seconds_left(
  progress: Sequence[Progress], parallel: int
) -> float | None:
  """Estimate for all runs that are not done, `parallel` at a time.

  A run without a step takes as long as the mean of the others.
  """
  left = list(map(seconds_left, progress))
  measured = [run for run in progress if run.step_seconds]
  if None in left and not measured:
    return None
  mean = sum(run.steps * (run.step_seconds or 0.0) for run in measured)
  mean /= max(1, len(measured))
  estimates = [mean if seconds is None else seconds for seconds in left]
  # A run is never split between workers.
  return max(sum(estimates) / max(1, parallel), *estimates, 0.0)


COLUMNS = (
  "run", "state", "step", "train loss", "validation", "left", "chip-hours",
  "attempts",
)  # fmt: skip


def cells(progress: Sequence[Progress]) -> list[list[str]]:
  """A line per run, of `COLUMNS`."""
  return [
    [
      run.name,
      run.status,
      f"{run.step:,}/{run.steps:,}",
      _number(run.train_loss),
      _number(run.validation_loss),
      "" if (left := seconds_left(run)) == 0.0 else duration(left),
      f"{run.chip_hours:.3g}" if run.chip_hours else "",
      str(run.attempts),
    ]
    for run in progress
  ]


def table(progress: Sequence[Progress]) -> str:
  """The output of `status`: a line per run, then a summary and errors."""
  parallel = sum(run.status == state_lib.RUNNING for run in progress)
  lines = [text_table.table(COLUMNS, cells(progress)), ""]
  lines.append(summary(progress, parallel))
  return "\n".join(lines + errors(progress))


def errors(progress: Sequence[Progress]) -> list[str]:
  """The error of every run that has one."""
  return [
    text_table.printable(f"{run.name}: {run.error}")
    for run in progress
    if run.error
  ]


def summary(progress: Sequence[Progress], parallel: int) -> str:
  """One line: the number of runs in each state, and the time left."""
  counts: dict[str, int] = {}
  for run in progress:
    counts[run.status] = counts.get(run.status, 0) + 1
  done = counts.pop(state_lib.DONE, 0)
  parts = [f"{done}/{len(progress)} done"]
  parts += [f"{count} {status}" for status, count in sorted(counts.items())]
  left = total_seconds_left(progress, parallel)
  if left != 0.0:
    parts.append(f"{duration(left)} left with {max(1, parallel)} at a time")
  hours = sum(run.chip_hours for run in progress)
  if hours:
    tokens = sum(run.tokens for run in progress)
    every = sum(run.all_tokens for run in progress)
    parts.append(f"{tokens:,} of {every:,} tokens")
    parts.append(account.hours_text(hours))
  return ", ".join(parts)


def duration(seconds: float | None) -> str:
  """Such as 0:04:10."""
  if seconds is None:
    return "?"
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02d}:{rest:02d}"


def _number(value: float | None) -> str:
  return "" if value is None else f"{value:.4f}"


def _loss(row: Mapping[str, Any]) -> float | None:
  """A value of a row of metrics; None if missing or not finite."""
  value = row.get("loss")
  return None if value is None else float(value)
