# SPDX-License-Identifier: Apache-2.0
"""The results of the demo: records of runs, rows and a table."""

from collections.abc import Mapping, Sequence
import functools
import json
import math
import pathlib
import statistics
from typing import Any, NamedTuple

from attnres_jax import config as config_lib
from attnres_jax import scaling
from attnres_jax.analysis import figures
from attnres_jax.scaling import fit
from attnres_jax.scaling import pairs
from attnres_jax.sweep import rows as sweep_rows
from attnres_jax.train import metrics
from experiments.demo import step_time
from experiments.pages import curves
from experiments.pages import losses as losses_lib
from experiments.pages import page

BASELINE = losses_lib.BASELINE
_COLUMNS = "scheme", "validation_nats_per_token"
losses = functools.partial(losses_lib.of_scheme, columns=_COLUMNS)
differences = functools.partial(losses_lib.differences, columns=_COLUMNS)

Row = Mapping[str, str]


class Run(NamedTuple):
  """One scheme trained from one seed.

  Attributes:
    scheme: a key of `RESIDUALS`.
    seed: of the initial weights and of the data order.
    train: tokens seen, and nats per token at each of them.
    validation: the same for a sample of the validation split.
    row: its columns of results.csv, as text.
  """

  scheme: str
  seed: int
  train: curves.Series
  validation: curves.Series
  row: Row


def load_run(
  folder: pathlib.Path,
  scheme: str,
  seed: int,
  summary: Mapping[str, Any],
  whole: Mapping[str, float],
) -> Run:
  """The record of a finished run.

  Args:
    folder: of the run.
    scheme: its residual scheme.
    seed: of the run.
    summary: what training returned.
    whole: `loss` and `bits_per_byte` of the whole validation split.
  """
  config = json.loads((folder / "config.json").read_text())
  tokens = config["data"]["batch_size"] * config["data"]["sequence_length"]
  found = metrics.read_rows(folder)
  rows = {
    split: [row for row in found if row["split"] == split]
    for split in ("train", "validation")
  }
  train, validation = (
    ([row["step"] * tokens for row in own], [row["loss"] for row in own])
    for own in rows.values()
  )
  row = {
    "scheme": scheme,
    "seed": str(seed),
    "validation_nats_per_token": f"{whole['loss']:.5f}",
    "validation_bits_per_byte": f"{whole['bits_per_byte']:.5f}",
    "train_tokens": str(train[0][-1]),
    "parameters": str(summary["parameters"]),
    "step_bytes": str(sweep_rows.step_bytes(found)),
    "run_seconds": f"{summary['seconds']:.0f}",
  }
  return Run(scheme, seed, train, validation, row)


def corpus(run: pathlib.Path) -> str:
  """A line about the text that a run was trained on, from its data.json."""
  splits = json.loads((run / "data.json").read_text())
  train, validation = splits["train"], splits["validation"]
  return (
    f"standard library and help topics of Python {train['python']},"
    f" {train['split_bytes'] / 1e6:.2f} MB for training and"
    f" {validation['split_bytes'] / 1e6:.2f} MB for validation"
    f" (SHA-256 {train['sha256'][:12]})"
  )


def rows(
  runs: Sequence[Run],
  step_times: Mapping[str, Mapping[str, Any]],
  facts: Mapping[str, Any],
) -> list[dict[str, Any]]:
  """A row per run.

  Args:
    runs: all of them.
    step_times: columns of each scheme, see `step_time.measure`.
    facts: columns that are the same in all rows, such as the machine.
  """
  return [{**run.row, **step_times[run.scheme], **facts} for run in runs]


def full(rows: Sequence[Row]) -> list[Row]:
  """The compared runs, without the baseline's shorter ones."""
  most = max(int(row["train_tokens"]) for row in rows)
  return [row for row in rows if int(row["train_tokens"]) == most]


def more_steps(rows: Sequence[Row], scheme: str) -> fit.Estimate | None:
  """The share of further steps that PreNorm needs for the loss of a scheme.

  From PreNorm's runs of several lengths, see `scaling.effective_speedup`; the
  spread of pairs is pooled over all schemes. None if PreNorm has one length
  only, or its loss does not fall.
  """

  def of(name):
    own = [row for row in rows if row["scheme"] == name]
    tokens = [int(row["train_tokens"]) for row in own]
    nats = [float(row["validation_nats_per_token"]) for row in own]
    seeds = tuple(int(row["seed"]) for row in own)
    return fit.Runs(tokens, nats, tuple(tokens), seeds)

  by_scheme: dict[str, dict[int, float]] = {}
  for row in full(rows):
    own = by_scheme.setdefault(row["scheme"], {})
    own[int(row["seed"])] = float(row["validation_nats_per_token"])
  spread = pairs.pooled(by_scheme, BASELINE)
  try:
    times = scaling.effective_speedup(of(BASELINE), of(scheme), spread=spread)
  except config_lib.ConfigError:
    return None
  return fit.Estimate(
    times.value - 1,
    *(None if end is None else end - 1 for end in (times.low, times.high)),
  )


def _steps_cell(found: fit.Estimate | None) -> page.Cell:
  if found is None:
    return page.Cell("unknown")
  middle, low, high = (
    "no bound" if end is None or math.isinf(end)
    else f"{page.signed(100 * end, 0)} %"
    for end in found
  )  # fmt: skip
  return page.Cell(middle, f"({low} to {high})")


def table(rows: Sequence[Row]) -> page.Table:
  """A line per scheme."""
  lines, every = [], rows
  rows = full(rows)
  busy = step_time.busy({row["scheme"]: row for row in rows})
  for scheme in dict.fromkeys(row["scheme"] for row in rows):
    first = next(row for row in rows if row["scheme"] == scheme)
    found = [loss for _, loss in losses(rows, scheme)]
    apart = differences(rows, scheme)
    seeds = ", ".join(f"{loss:.3f}" for loss in found)
    lines.append(
      [
        figures.name_of(scheme),
        page.Cell(f"**{statistics.fmean(found):.3f}**", f"({seeds})"),
        page.Cell(
          page.signed(statistics.fmean(apart), 3) if apart else "",
          small=[", ".join(page.signed(one) for one in apart)],
        ),
        "" if scheme == BASELINE else _steps_cell(more_steps(every, scheme)),
        "not measured" if busy else _time_cell(first),
        f"{int(first['parameters']):,}",
        f"{int(first['step_bytes']) / 1e6:.0f} MB",
      ]
    )
  header = [
    "residual", "validation loss, nats per byte", "minus PreNorm's",
    "PreNorm needs more steps", "step time", "parameters", "step memory",
  ]  # fmt: skip
  return page.Table(header, lines)


def _time_cell(row: Row) -> page.Cell:
  low, high = (float(row[f"step_time_ratio_{end}"]) for end in ("min", "max"))
  return page.Cell(
    f"{float(row['step_time_ratio']):.2f}x",
    f"({low:.2f} to {high:.2f})",
    [f"{1e3 * float(row['step_seconds']):.0f} ms"],
  )


def markdown(rows: Sequence[Row]) -> str:
  """The table of the README, and its origin."""
  first, seeds = rows[0], [seed for seed, _ in losses(full(rows), BASELINE)]
  busy = step_time.busy({row["scheme"]: row for row in full(rows)})
  note = f"Step times are not measured: {busy}.\n\n" if busy else ""
  return (
    f"{table(rows).markdown()}\n\n{note}"
    f"{int(first['train_tokens']):,} tokens per run,"
    f" seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}; {first['corpus']};"
    f" {first['hardware']}; Python {first['python']}, jax {first['jax']},"
    f" commit {first['commit']}.\n"
  )
