# SPDX-License-Identifier: Apache-2.0
"""How well a sample of the validation text measures the difference of two nets.

  python -m experiments.noise.evaluation --workdir=runs/noise

reads pairs of finished runs, evaluates both networks (with their last weights)
row by row on the whole validation split, and writes a line per pair to
evaluation.csv beside this file. Rows of 128 bytes come from all documents in
turn. So the spread of rows divided by the root of their number is the error of
a mean over them, as an estimate for all text of this kind.
"""

import argparse
from collections.abc import Iterator, Sequence
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import data
from attnres_jax.common import command_line
from attnres_jax.common import csv_rows
from attnres_jax.common import environment
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import state as state_lib
from attnres_jax.train import checkpoint
from experiments import publish
from experiments.noise import config as noise

_FILE = pathlib.Path(__file__).with_name("evaluation.csv")


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = command_line.Parser(
    "python -m experiments.noise.evaluation", __doc__
  )
  parser.add_argument("--workdir", default="runs/noise", help="of the sweep")
  return command_line.run(_main, parser.parse_args(argv))


def row_losses(workdir: pathlib.Path) -> np.ndarray:
  """Mean loss of each full row of the validation split, in its fixed order."""
  config, model = checkpoint.load_model(workdir)
  step = jax.jit(_row_losses)
  batches = data.open_dataset(config.data, "validation").batches()
  try:
    losses, full = zip(*(
      (step(model, one["tokens"]), one["counts"].all(axis=1)) for one in batches
    ))  # fmt: skip
    return np.concatenate(losses)[np.concatenate(full)]
  finally:
    batches.close()


def _row_losses(model: Any, tokens_BT: jax.Array) -> jax.Array:
  log_p_BTV = jax.nn.log_softmax(model(tokens_BT[:, :-1]))
  picked_BT1 = jnp.take_along_axis(log_p_BTV, tokens_BT[:, 1:, None], axis=-1)
  return -jnp.mean(picked_BT1, axis=(1, 2))


def _pairs(
  folder: pathlib.Path,
) -> Iterator[tuple[int, pathlib.Path, pathlib.Path]]:
  """Seeds of finished pairs, with the folders of PreNorm and Block AttnRes."""
  done = {
    json.dumps(run.overrides, sort_keys=True): folder / run.name
    for run in folder_lib.read(folder)
    if state_lib.read(folder / run.name).status == state_lib.DONE
  }
  for seed in noise.SEEDS:
    base, _, other = (
      done.get(json.dumps(run, sort_keys=True))
      for run in noise.pairs(noise.SETTLED, seed)
    )
    if base and other:
      yield seed, base, other


def _main(options: argparse.Namespace) -> None:
  origin, found = environment.facts(), []
  for seed, base, other in _pairs(pathlib.Path(options.workdir)):
    apart = row_losses(other) - row_losses(base)
    row = {
      "seed": seed,
      "rows": len(apart),
      "difference": f"{apart.mean():.6f}",
      "spread_of_rows": f"{apart.std(ddof=1):.6f}",
    }
    print(row, flush=True)
    found.append(row | origin)
  csv_rows.write(_FILE, found)
  publish.publish(publish.load("noise"))


if __name__ == "__main__":
  sys.exit(main())
