# SPDX-License-Identifier: Apache-2.0
"""Measures how outputs and gradients grow with depth, and when losses part.

  python -m experiments.training_dynamics.run --runs=runs/ablations

See the README beside this file.
"""

from collections.abc import Iterator
import dataclasses
import json
import pathlib
import sys

import numpy as np

from attnres_jax import analysis
from experiments import trained
from experiments.pages import readme
from experiments.training_dynamics import report

# Sequences of a batch; the gradient of a batch is one of the series.
_BATCH = 16
SERIES = ("state_rms", "output_rms", "read_rms", "grad_norm", "output_grad_rms")


def measure(network: trained.Network) -> list[trained.Row]:
  """A row per quantity: a JSON list over transformer blocks, or over steps."""
  batches = [
    network.tokens_BT[start : start + _BATCH]
    for start in range(0, len(network.tokens_BT), _BATCH)
  ]
  found = [
    dataclasses.asdict(analysis.magnitudes(network.model, batch))
    for batch in batches
  ]
  means = {
    name: np.mean([one[name] for one in found], axis=0) for name in SERIES
  }
  steps, losses = zip(*training_losses(network.folder))
  return [
    {"series": name, "values": json.dumps([float(f"{x:.4g}") for x in values])}
    for name, values in (means | {"step": steps, "train_loss": losses}).items()
  ]


def training_losses(folder: pathlib.Path) -> Iterator[tuple[int, float]]:
  """Steps and training losses of the log of a run."""
  for line in (folder / "metrics.jsonl").read_text().splitlines():
    logged = json.loads(line)
    if logged["split"] == "train":
      yield logged["step"], logged["loss"]


LOOK = trained.Look(
  readme.Published(
    pathlib.Path(__file__).absolute().parent,
    [readme.Place(report.results)],
    {"magnitudes.svg": report.magnitudes, "losses.svg": report.losses},
  ),
  report.VARIANTS,
  measure,
)
PUBLISHED = LOOK.published

if __name__ == "__main__":
  sys.exit(trained.command(LOOK))
