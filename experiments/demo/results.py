# SPDX-License-Identifier: Apache-2.0
"""The results of the demo: records of runs, rows and a table."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import json
import pathlib
import statistics
from typing import Any

from attnres_jax import metrics
from attnres_jax.analysis import plots
from experiments.pages import page

BASELINE = "prenorm"

Row = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Run:
  """One scheme trained from one seed.

  Attributes:
    scheme: a key of `RESIDUALS`.
    seed: of the initial weights and of the data order.
    train_tokens: tokens seen at each entry of `train_loss`.
    train_loss: nats per token.
    validation_tokens: tokens seen at each entry of `validation_loss`.
    validation_loss: nats per token; the last one is the result.
    bits_per_byte: of the last evaluation.
    parameters: trained numbers.
    seconds: what the run took, compilation and evaluations included.
    step_bytes: memory of the compiled training step.
  """

  scheme: str
  seed: int
  train_tokens: tuple[int, ...]
  train_loss: tuple[float, ...]
  validation_tokens: tuple[int, ...]
  validation_loss: tuple[float, ...]
  bits_per_byte: float
  parameters: int
  seconds: float
  step_bytes: int


def load_run(
  folder: pathlib.Path, scheme: str, seed: int, summary: Mapping[str, Any]
) -> Run:
  """The record of a finished run, from its folder and summary."""
  config = json.loads((folder / "config.json").read_text())
  tokens = config["data"]["batch_size"] * config["data"]["sequence_length"]
  train = metrics.read_rows(folder, "train")
  validation = metrics.read_rows(folder, "validation")
  step_bytes = [
    row["argument_bytes"] + row["temporary_bytes"]
    for row in metrics.read_rows(folder, "event")
    if row["event"] == "compiled" and row["function"] == "train_step"
  ]
  return Run(
    scheme=scheme,
    seed=seed,
    train_tokens=tuple(row["step"] * tokens for row in train),
    train_loss=tuple(row["loss"] for row in train),
    validation_tokens=tuple(row["step"] * tokens for row in validation),
    validation_loss=tuple(row["loss"] for row in validation),
    bits_per_byte=validation[-1]["bits_per_byte"],
    parameters=summary["parameters"],
    seconds=summary["seconds"],
    step_bytes=step_bytes[-1],
  )


def corpus(run: pathlib.Path) -> str:
  """One line about the text that a run was trained on, from its data.json."""
  splits = json.loads((run / "data.json").read_text())
  train, validation = splits["train"], splits["validation"]
  return (
    f"standard library and help topics of Python {train['python']},"
    f" {train['split_bytes'] / 1e6:.2f} MB for training and"
    f" {validation['split_bytes'] / 1e6:.2f} MB for validation"
    f" (SHA-256 {train['sha256'][:12]})"
  )


def by_scheme(runs: Iterable[Run]) -> dict[str, list[Run]]:
  """Runs of each scheme, in the order in which the schemes appear."""
  groups: dict[str, list[Run]] = {}
  for run in runs:
    groups.setdefault(run.scheme, []).append(run)
  return groups


def rows(
  runs: Sequence[Run],
  step_seconds: Mapping[str, float],
  facts: Mapping[str, Any],
) -> list[dict[str, str]]:
  """One per run; `facts` become columns that are the same in all rows.

  Args:
    runs: all of them.
    step_seconds: of each scheme, measured side by side.
    facts: where the rows come from.
  """
  return [
    {
      "scheme": run.scheme,
      "seed": str(run.seed),
      "validation_nats_per_token": f"{run.validation_loss[-1]:.5f}",
      "validation_bits_per_byte": f"{run.bits_per_byte:.5f}",
      "train_tokens": str(run.train_tokens[-1]),
      "parameters": str(run.parameters),
      "step_seconds": f"{step_seconds[run.scheme]:.4f}",
      "step_time_ratio": (
        f"{step_seconds[run.scheme] / step_seconds[BASELINE]:.3f}"
      ),
      "step_bytes": str(run.step_bytes),
      "run_seconds": f"{run.seconds:.0f}",
      **facts,
    }
    for run in runs
  ]


def losses(rows: Iterable[Row], scheme: str) -> dict[str, float]:
  """Final validation loss of a scheme, in nats per byte, by seed."""
  return {
    row["seed"]: float(row["validation_nats_per_token"])
    for row in rows
    if row["scheme"] == scheme
  }


def differences(rows: Sequence[Row], scheme: str) -> list[float]:
  """From the baseline, of each seed that both were trained with."""
  baseline = losses(rows, BASELINE)
  return [
    loss - baseline[seed]
    for seed, loss in losses(rows, scheme).items()
    if seed in baseline
  ]


def table(rows: Sequence[Row]) -> page.Table:
  """A line per scheme."""
  lines = []
  for scheme in dict.fromkeys(row["scheme"] for row in rows):
    first = next(row for row in rows if row["scheme"] == scheme)
    found = losses(rows, scheme).values()
    apart = differences(rows, scheme)
    seeds = ", ".join(f"{loss:.3f}" for loss in found)
    lines.append(
      [
        plots.name_of(scheme),
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
  """The table of the README, and where it is from."""
  first, seeds = rows[0], losses(rows, BASELINE)
  return (
    f"{table(rows).markdown()}\n\n"
    f"{int(first['train_tokens']):,} tokens per run,"
    f" seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}; {first['corpus']};"
    f" {first['hardware']}; Python {first['python']}, jax {first['jax']},"
    f" commit {first['commit']}.\n"
  )
