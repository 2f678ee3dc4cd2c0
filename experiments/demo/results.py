# SPDX-License-Identifier: Apache-2.0
"""What a demo run comes down to: records, a CSV and a Markdown table."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import json
import pathlib
from typing import Any

from attnres_jax import csv_rows
from attnres_jax import metrics
from attnres_jax.analysis import plots

BASELINE = "prenorm"


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


@dataclasses.dataclass(frozen=True)
class Summary:
  """One scheme over all its seeds.

  Attributes:
    losses: final validation loss per seed.
    differences: the same less the baseline's from the same seed.
    step_ratio: step time over the baseline's, or None if not measured.
  """

  scheme: str
  losses: tuple[float, ...]
  differences: tuple[float, ...]
  parameters: int
  step_bytes: int
  step_seconds: float | None
  step_ratio: float | None

  @property
  def loss(self) -> float:
    return _mean(self.losses)

  @property
  def difference(self) -> float:
    return _mean(self.differences)


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


def summarise(
  runs: Sequence[Run], step_seconds: Mapping[str, float] | None = None
) -> list[Summary]:
  """One line per scheme.

  Args:
    runs: all of them; a difference needs the baseline's run of the same seed.
    step_seconds: per scheme, measured side by side.
  """
  baseline = {
    run.seed: run.validation_loss[-1] for run in runs if run.scheme == BASELINE
  }
  seconds = step_seconds or {}
  summaries = []
  for scheme, several in by_scheme(runs).items():
    losses = tuple(run.validation_loss[-1] for run in several)
    ratio = None
    if scheme in seconds and BASELINE in seconds:
      ratio = seconds[scheme] / seconds[BASELINE]
    summaries.append(
      Summary(
        scheme=scheme,
        losses=losses,
        differences=tuple(
          run.validation_loss[-1] - baseline[run.seed]
          for run in several
          if run.seed in baseline
        ),
        parameters=several[0].parameters,
        step_bytes=several[0].step_bytes,
        step_seconds=seconds.get(scheme),
        step_ratio=ratio,
      )
    )
  return summaries


def write_csv(
  path: pathlib.Path,
  runs: Sequence[Run],
  step_seconds: Mapping[str, float],
  facts: Mapping[str, Any],
) -> None:
  """One row per run; `facts` become columns that are the same in all rows."""
  ratios = {s.scheme: s.step_ratio for s in summarise(runs, step_seconds)}
  rows = [
    {
      "scheme": run.scheme,
      "seed": run.seed,
      "validation_nats_per_token": f"{run.validation_loss[-1]:.5f}",
      "validation_bits_per_byte": f"{run.bits_per_byte:.5f}",
      "train_tokens": run.train_tokens[-1],
      "parameters": run.parameters,
      "step_seconds": f"{step_seconds[run.scheme]:.4f}",
      "step_time_ratio": f"{ratios[run.scheme]:.3f}",
      "step_bytes": run.step_bytes,
      "run_seconds": f"{run.seconds:.0f}",
      **facts,
    }
    for run in runs
  ]
  csv_rows.write(path, rows)


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
  """The table of the README, from the rows of results.csv."""
  lines = [
    "| residual | validation loss, nats per byte |"
    " difference from PreNorm | step time | parameters | step memory |",
    "|---|---|---|---|---|---|",
  ]
  baseline = {
    row["seed"]: float(row["validation_nats_per_token"])
    for row in rows
    if row["scheme"] == BASELINE
  }
  for scheme in dict.fromkeys(row["scheme"] for row in rows):
    several = [row for row in rows if row["scheme"] == scheme]
    losses = {
      row["seed"]: float(row["validation_nats_per_token"]) for row in several
    }
    differences = [loss - baseline[seed] for seed, loss in losses.items()]
    seeds = ", ".join(f"{loss:.3f}" for loss in losses.values())
    first = several[0]
    lines.append(
      f"| {plots.name_of(scheme)} | **{_mean(losses.values()):.3f}**"
      f" ({seeds}) | {_signed(_mean(differences))} |"
      f" {float(first['step_time_ratio']):.2f}x |"
      f" {int(first['parameters']):,} |"
      f" {int(first['step_bytes']) / 1e6:.0f} MB |"
    )
  first, plural = rows[0], "s" * (len(baseline) > 1)
  lines += [
    "",
    f"{int(first['train_tokens']):,} tokens per run, seed{plural}"
    f" {', '.join(baseline)}; {first['corpus']}; {first['hardware']};"
    f" Python {first['python']}, jax {first['jax']},"
    f" commit {first['commit']}.",
  ]
  return "\n".join(lines) + "\n"


def _signed(value: float) -> str:
  text = f"{value:+.3f}"
  return "0" if float(text) == 0 else text.replace("-", "\N{MINUS SIGN}")


def _mean(values: Iterable[float]) -> float:
  values = tuple(values)
  return sum(values) / len(values) if values else float("nan")
