# SPDX-License-Identifier: Apache-2.0
"""Networks that a study has trained, for experiments that look into them.

Such an experiment is a `Look`: what it measures of one network, as rows. Its
run.py exports what `experiment` returns, and its command is

  python -m experiments.NAME.run --runs=runs/ablations
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
import pathlib
import sys
from typing import Any, NamedTuple

import numpy as np
import tqdm

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax import models
from attnres_jax.common import command_line
from attnres_jax.common import csv_rows
from attnres_jax.common import environment
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import state as state_lib
from attnres_jax.train import checkpoint
from experiments import publish
from experiments.ablations import config as ablations
from experiments.pages import readme

RUNS = "runs/ablations"
# Rows of the validation split that are measured.
NUM_ROWS = 64
# What a run of a study has beside its variant and its seeds.
_SEEDS = {"variant", "seed", "data.seed"}

Row = Mapping[str, Any]


class Network(NamedTuple):
  """A finished run.

  Attributes:
    variant: its name in the study.
    seed: of weights and data.
    folder: of the run.
    model: with the weights of its last checkpoint.
    tokens_BT: the first rows of its validation split, inputs and targets.
  """

  variant: str
  seed: int
  folder: pathlib.Path
  model: models.Transformer
  tokens_BT: np.ndarray


class Look(NamedTuple):
  """An experiment on trained networks.

  Attributes:
    published: what is made of its rows.
    variants: names of the runs that it measures, in order.
    measure: of a network: rows, without their origin.
  """

  published: readme.Published
  variants: Sequence[str]
  measure: Callable[[Network], Sequence[Row]]


def finished(
  folder: pathlib.Path | str, variants: Sequence[str]
) -> Iterator[tuple[str, int, pathlib.Path]]:
  """Variant, seed and folder of finished runs, variant by variant.

  Runs with another rate or budget than the variant's own are left out.
  """
  folder = pathlib.Path(folder)
  found = sorted(
    (variants.index(run.overrides["variant"]), run.overrides["seed"], run.name)
    for run in folder_lib.read(folder)
    if set(run.overrides) == _SEEDS and run.overrides["variant"] in variants
  )
  for index, seed, name in found:
    if state_lib.read(folder / name).status == state_lib.DONE:
      yield variants[index], seed, folder / name


def load(variant: str, seed: int, folder: pathlib.Path) -> Network:
  """Loads the last checkpoint of a run, and validation text."""
  config, model = checkpoint.load_model(folder)
  batches = data.open_dataset(config.data, "validation").batches()
  rows: list[np.ndarray] = []
  try:
    while sum(map(len, rows)) < NUM_ROWS:
      batch = next(batches)
      rows.append(batch["tokens"][batch["counts"].all(axis=1)])
  finally:
    batches.close()
  tokens_BT = np.concatenate(rows)[:NUM_ROWS]
  return Network(variant, seed, folder, model, tokens_BT)


def label(variant: str) -> str:
  """Of a row, in tables and figures."""
  return ablations.STUDY.variants[variant].label


def spread(values: Sequence[float], digits: int = 2) -> str:
  """The mean over networks, and their range if there are several."""
  text = f"{np.mean(values):.{digits}f}"
  if len(values) > 1:
    text += f" ({min(values):.{digits}f} to {max(values):.{digits}f})"
  return text


def seeds(rows: Sequence[Row]) -> str:
  """The seeds of rows, as a list in words."""
  return ", ".join(map(str, sorted({int(row["seed"]) for row in rows})))


def origin(rows: Sequence[Row]) -> str:
  """Machine, version and commit of rows."""
  machines = sorted({f"{row['hardware']}, jax {row['jax']}" for row in rows})
  commits = sorted({row["commit"] for row in rows})
  return f"{', '.join(machines)}, commit {', '.join(commits)}."


def command(look: Look, argv: Sequence[str] | None = None) -> int:
  """Measures what is finished; keeps rows of runs that are not in the folder.

  Returns:
    The exit status.
  """
  name = look.published.folder.name
  parser = command_line.Parser(f"python -m experiments.{name}.run", __doc__)
  parser.add_argument(
    "--runs", default=RUNS, help="folder of the sweep that trained them"
  )
  return command_line.run(
    lambda options: _main(look, options), parser.parse_args(argv)
  )


def _main(look: Look, options: argparse.Namespace) -> None:
  runs = list(finished(options.runs, look.variants))
  if not runs:
    raise config_lib.ConfigError(
      f"--runs: got {options.runs!r}, expected the folder of a sweep with a"
      f" finished run of {', '.join(look.variants)}"
    )
  path = look.published.folder / "results.csv"
  found: dict[tuple[str, int], list[Row]] = {}
  for row in look.published.read():
    found.setdefault((row["variant"], int(row["seed"])), []).append(row)
  origin = environment.facts()
  for variant, seed, folder in tqdm.tqdm(runs, unit="network", file=sys.stderr):
    own = {"variant": variant, "seed": seed}
    network = load(variant, seed, folder)
    found[variant, seed] = [
      own | dict(row) | origin for row in look.measure(network)
    ]
    order = sorted(found, key=lambda key: (look.variants.index(key[0]), key[1]))
    csv_rows.write(path, [row for key in order for row in found[key]])
  publish.publish(look.published)
