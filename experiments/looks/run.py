# SPDX-License-Identifier: Apache-2.0
"""Looks into trained networks: what they read, and how magnitudes grow.

  python -m experiments.looks.run --runs=runs/ablations

Measures what is finished in a sweep of experiments/ablations, and keeps rows of
runs that are not in the folder. A row is one series of a network: a JSON list
over sublayers, blocks or sources. Rows go to results.csv beside this
file; the README and its figures are filled from them.
"""

import argparse
from collections.abc import Iterator, Sequence
import dataclasses
import itertools
import json
import sys
from typing import Any, NamedTuple

from etils import epath
import numpy as np
import tqdm

from attnres_jax import analysis
from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax import models
from attnres_jax.common import command_line
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import state as state_lib
from attnres_jax.train import checkpoint
from experiments.looks import report

# Rows of the validation split that are measured, and rows of a batch: the
# gradient of a batch is one of the series.
NUM_ROWS, _BATCH = 64, 16
# What a run of a study has beside its variant and its seeds.
_SEEDS = {"variant", "seed", "data.seed"}
# Relative singular values below this do not count.
_TOLERANCE = 1e-3
_KEY = "variant", "seed", "series"


class Network(NamedTuple):
  """A finished run of a variant, with the weights of its last checkpoint.

  Tokens are the first rows of its validation split, inputs and targets.
  """

  variant: str
  seed: int
  model: models.Transformer
  tokens_BT: np.ndarray


def finished(
  folder: epath.PathLike, variants: Sequence[str]
) -> Iterator[tuple[str, int, epath.Path]]:
  """Variant, seed and folder of finished runs, variant by variant.

  Runs with another rate or budget than the variant's own are left out.
  """
  folder = epath.Path(folder)
  runs = sorted(
    (variants.index(run.overrides["variant"]), run.overrides["seed"], run.name)
    for run in folder_lib.read(folder)
    if set(run.overrides) == _SEEDS and run.overrides["variant"] in variants
  )
  for index, seed, name in runs:
    if state_lib.read(folder / name).status == state_lib.DONE:
      yield variants[index], seed, folder / name


def load(variant: str, seed: int, folder: epath.PathLike) -> Network:
  """Loads the last checkpoint of a run, and validation text."""
  config, model = checkpoint.load_model(folder)
  batches = data.open_dataset(config.data, "validation").batches()
  rows: list[np.ndarray] = []
  try:
    for batch in batches:  # A short split has fewer rows.
      rows.append(batch["tokens"][batch["counts"].all(axis=1)])
      if sum(map(len, rows)) >= NUM_ROWS:
        break
  finally:
    batches.close()
  tokens_BT = np.concatenate(rows)[:NUM_ROWS]
  return Network(variant, seed, model, tokens_BT)


def measure(network: Network) -> dict[str, Any]:
  """All series of a network."""
  model, tokens_BT = network.model, network.tokens_BT
  inputs_BT = tokens_BT[:, :-1]
  # The matrix is an average over tokens, and the rank is of one token's.
  of_token = analysis.mixing_matrix(model, inputs_BT[:1, :1], channel=0)
  series = {
    "rank": analysis.semiseparable_rank(of_token, _TOLERANCE),
    "matrix": _digits(analysis.mixing_matrix(model, inputs_BT), 4),
  }
  if network.variant in report.SIZES:
    batches = np.array_split(tokens_BT, max(1, len(tokens_BT) // _BATCH))
    measured = [analysis.magnitudes(model, batch) for batch in batches]
    for name in report.MAGNITUDES:
      means = np.mean([getattr(m, name) for m in measured], axis=0)
      series[name] = [float(f"{x:.4g}") for x in means]
  if network.variant in report.READERS:
    weights = analysis.depth_weights(model, inputs_BT)
    for field in dataclasses.fields(weights):
      value = getattr(weights, field.name)
      is_text = "columns" in field.name
      series[field.name] = value if is_text else _digits(value, 5)
    removal = analysis.source_removal(model, tokens_BT)
    series["importance"] = _digits(removal.importance, 6)
    series["read_weights"] = _digits(removal.weights, 6)
  return series


def _digits(values: Any, digits: int) -> Any:
  return np.round(np.asarray(values, np.float64), digits).tolist()


def rows_of(network: Network) -> Iterator[dict[str, Any]]:
  """A row per series; NaN becomes null, as JSON has no other name for it."""
  for series, values in measure(network).items():
    text = json.dumps(values).replace("NaN", "null")
    cells = network.variant, network.seed, series
    yield dict(zip(_KEY, cells)) | {"values": text}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = command_line.Parser("python -m experiments.looks.run", __doc__)
  parser.add_argument(
    "--runs", default="runs/ablations", help="the sweep that trained them"
  )
  return command_line.run(_main, parser.parse_args(argv))


def _main(options: argparse.Namespace) -> None:
  runs = list(finished(options.runs, report.VARIANTS))
  if not runs:
    raise config_lib.ConfigError(
      f"--runs: got {options.runs!r}, expected the folder of a sweep with a"
      f" finished run of {', '.join(report.VARIANTS)}"
    )
  networks = (load(*run) for run in tqdm.tqdm(runs, unit="network"))
  rows = itertools.chain.from_iterable(map(rows_of, networks))
  report.PUBLISHED.measure(rows, _KEY)


if __name__ == "__main__":
  sys.exit(main())
