# SPDX-License-Identifier: Apache-2.0
"""The results of the demo: records of runs, rows and a table."""

from collections.abc import Mapping, Sequence
import functools
import json
import pathlib
import statistics
from typing import Any, NamedTuple

from attnres_jax.analysis import figures
from attnres_jax.sweep import rows as sweep_rows
from attnres_jax.train import metrics
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
    validation: the same for validation; the last loss is the result.
    row: its columns of results.csv, as text.
  """

  scheme: str
  seed: int
  train: curves.Series
  validation: curves.Series
  row: Row


def load_run(
  folder: pathlib.Path, scheme: str, seed: int, summary: Mapping[str, Any]
) -> Run:
  """The record of a finished run, from its folder and summary."""
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
  last = rows["validation"][-1]
  row = {
    "scheme": scheme,
    "seed": str(seed),
    "validation_nats_per_token": f"{last['loss']:.5f}",
    "validation_bits_per_byte": f"{last['bits_per_byte']:.5f}",
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
  step_seconds: Mapping[str, float],
  facts: Mapping[str, Any],
) -> list[dict[str, Any]]:
  """A row per run.

  Args:
    runs: all of them.
    step_seconds: of each scheme, measured side by side.
    facts: columns that are the same in all rows, such as the machine.
  """
  return [
    {
      **run.row,
      "step_seconds": f"{step_seconds[run.scheme]:.4f}",
      "step_time_ratio": (
        f"{step_seconds[run.scheme] / step_seconds[BASELINE]:.3f}"
      ),
      **facts,
    }
    for run in runs
  ]


def table(rows: Sequence[Row]) -> page.Table:
  """A line per scheme."""
  lines = []
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
        page.Cell(
          f"{float(first['step_time_ratio']):.2f}x",
          small=[f"{1e3 * float(first['step_seconds']):.0f} ms"],
        ),
        f"{int(first['parameters']):,}",
        f"{int(first['step_bytes']) / 1e6:.0f} MB",
      ]
    )
  header = [
    "residual", "validation loss, nats per byte", "difference from PreNorm",
    "step time", "parameters", "step memory",
  ]  # fmt: skip
  return page.Table(header, lines)


def markdown(rows: Sequence[Row]) -> str:
  """The table of the README, and its origin."""
  first, seeds = rows[0], [seed for seed, _ in losses(rows, BASELINE)]
  return (
    f"{table(rows).markdown()}\n\n"
    f"{int(first['train_tokens']):,} tokens per run,"
    f" seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}; {first['corpus']};"
    f" {first['hardware']}; Python {first['python']}, jax {first['jax']},"
    f" commit {first['commit']}.\n"
  )
