# SPDX-License-Identifier: Apache-2.0
"""Trains PreNorm networks, upcycles them, and trains all forms on.

  python -m experiments.upcycle.run

Writes rows to `results.csv` beside this file, seed by seed, and fills the
README from them. Rerun the same command to resume: runs continue
from their last checkpoint, and existing rows are not computed again.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import pathlib
import sys
from typing import Any

import jax
import tqdm

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import files
from attnres_jax.config import fields
from attnres_jax.interop import upcycle
from attnres_jax.interop import weights_folder
from attnres_jax.train import checkpoint
from attnres_jax.train import loop
from attnres_jax.train import run_folder
from experiments.upcycle import report

# Of the source: its network, and its protocol.
SOURCE = "configs/scaling.py:size=s,residual=prenorm"
PROTOCOL = {
  "optim.peak_lr": 6e-3,
  "optim.schedule": "linear",
  "train.average_last": 0.1,
  "checkpoint.every_steps": 0,
}
# Half of what the source was trained for, at half its peak rate.
SHARE, RATE_SHARE = 0.5, 0.5
BLOCK_SIZE = 4
FASTER = ("^residual/=10",)
# The order of the data differs from the source's.
OTHER_ORDER = 1000

_Residual = config_lib.residual_config
# Arm -> the scheme, and fields of `optim`.
ARMS: dict[str, tuple[config_lib.ResidualConfig, dict[str, Any]]] = {
  report.BASELINE: (_Residual("prenorm"), {}),
  "replacement": (_Residual("block_attnres", block_size=BLOCK_SIZE), {}),
  "delta": (_Residual("delta_mh", block_size=BLOCK_SIZE), {}),
  "delta_faster": (
    _Residual("delta_mh", block_size=BLOCK_SIZE), dict(rates=FASTER),
  ),
}  # fmt: skip

_KEY = "arm", "seed"


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = command_line.Parser("python -m experiments.upcycle.run", __doc__)
  add = parser.add_argument
  add("--seeds", type=fields.Few, default=8, help="pairs")
  add("--workdir", default="runs/upcycle", help="folder of all runs")
  add("--out", default="", help="another file of rows, not published")
  return command_line.run(_main, parser.parse_args(argv))


def _main(options: argparse.Namespace) -> None:
  fields.accept("--seeds", options.seeds, fields.Size)
  workdir = pathlib.Path(files.check_folder("--workdir", options.workdir))
  # Seed by seed, so that a part of them is already a comparison.
  runs = [(arm, seed) for seed in range(options.seeds) for arm in ARMS]
  missing = report.PUBLISHED.missing(runs, _KEY, options.out)
  rows = (_row(*run, workdir=workdir) for run in tqdm.tqdm(missing, unit="run"))
  report.PUBLISHED.measure(rows, _KEY, options.out)


def _row(arm: str, seed: int, workdir: pathlib.Path) -> dict[str, Any]:
  """Trains an arm, and its source if nobody has; returns what it reached."""
  jax.clear_caches()
  base = config_lib.load_config(SOURCE, PROTOCOL)
  data = dataclasses.replace(base.data, seed=seed)
  source = dataclasses.replace(base, seed=seed, data=data)
  folder = workdir / f"seed{seed}"
  reached = loop.train_and_evaluate(source, folder / "source")
  start = _upcycled(folder, arm)
  end = loop.train_and_evaluate(_continued(source, arm, start), folder / arm)
  return {
    "arm": arm,
    "seed": seed,
    "validation_loss": f"{end['validation_loss']:.6f}",
    "source_loss": f"{reached['validation_loss']:.6f}",
    "source_steps": source.train.steps,
    "steps": end["step"],
    "seconds": f"{end['seconds']:.0f}",
    "source_seconds": f"{reached['seconds']:.0f}",
  }


def _upcycled(folder: pathlib.Path, arm: str) -> pathlib.Path:
  """The folder of the network that an arm starts from."""
  start = folder / f"{arm}_start"
  if (start / run_folder.SUMMARY).exists():
    return start
  # An interrupted command may have left a part of it.
  start = weights_folder.check_new("--workdir", str(start))
  config, model = checkpoint.load_model(folder / "source", average=False)
  model = upcycle.upcycle(model, ARMS[arm][0])
  config = dataclasses.replace(config, model=model.config)
  weights_folder.write(start, config, model, {}, {})
  return start


def _continued(
  source: config_lib.RunConfig, arm: str, start: pathlib.Path
) -> config_lib.RunConfig:
  """Weights of `start`, a new optimiser, other data."""
  steps = max(1, round(SHARE * source.train.steps))
  config, _ = checkpoint.load_model(start)
  return dataclasses.replace(
    source,
    model=config.model,
    data=dataclasses.replace(source.data, seed=source.seed + OTHER_ORDER),
    optim=dataclasses.replace(
      source.optim,
      peak_lr=RATE_SHARE * source.optim.peak_lr,
      warmup_steps=steps // 20,
      **ARMS[arm][1],
    ),
    train=dataclasses.replace(source.train, steps=steps, start_from=str(start)),
  )


if __name__ == "__main__":
  sys.exit(main())
