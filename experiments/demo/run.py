# SPDX-License-Identifier: Apache-2.0
"""Trains four residual schemes side by side on real text and reports.

  make demo
  python -m experiments.demo.run

The schemes see the same data in the same order, start from the same weights and
share every hyper-parameter. PreNorm also runs for a fourth and half of the
steps, so that the report can say how many more steps it needs. The text is one
that every machine has: the standard library of the running Python. Rerun the
same command to resume an interrupted demo; finished runs are not repeated.

Writes report.html (one file, works offline) and results.csv to --workdir.
"""

import argparse
from collections.abc import Iterator
import pathlib
import sys
import time
from typing import Any

import jax

from attnres_jax import config as config_lib
from attnres_jax.analysis import figures
from attnres_jax.common import command_line
from attnres_jax.common import csv_rows
from attnres_jax.common import environment
from attnres_jax.common import files
from attnres_jax.config import fields
from attnres_jax.train import loop
from experiments.demo import inspection
from experiments.demo import report
from experiments.demo import results
from experiments.demo import step_time
from experiments.pages import readme

SCHEMES = ("prenorm", "rescaled", "full_attnres", "block_attnres")
_CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "paired.py"
_SAMPLE_BATCHES = 32
# PreNorm also runs for a fourth and half of the steps.
_PARTS = 4, 2


PUBLISHED = readme.Published(
  pathlib.Path(__file__).parent,
  [readme.Place(results.markdown)],
)


def main() -> int:
  """Runs the command; returns its exit status."""
  return command_line.run(_run, _parse_options())


def demo_config(scheme: str, seed: int, *, steps: int) -> config_lib.RunConfig:
  """The run of one scheme and seed; only the residual differs within a seed.

  The protocol of experiments/noise, with fewer steps: small batches, and a rate
  that falls to zero. Evaluations during training take a sample; `inspection`
  takes the whole validation split at the end.
  """
  overrides = {
    "name": f"demo_{scheme}_{seed}_{steps}",
    "seed": seed,
    "data.seed": seed,
    "mesh.data": 1,  # Four rows do not divide among more devices.
    "optim.warmup_steps": max(1, steps // 10),
    "train.steps": steps,
    "train.log_every": max(1, steps // 40),
    "train.eval_every": max(1, steps // 20),
    "train.eval_batches": _SAMPLE_BATCHES,
    "checkpoint.every_steps": max(1, steps // 4),
    "checkpoint.keep_last": 2,
  }
  return config_lib.load_config(f"{_CONFIG}:residual={scheme}", overrides)


def _run(options: argparse.Namespace) -> None:
  start = time.perf_counter()
  for name in ("seeds", "steps"):
    fields.accept(f"--{name}", getattr(options, name), fields.Size)
  workdir = pathlib.Path(options.workdir).absolute()
  ours = {"results.csv": ("scheme", "seed"), "report.html": ("AttnRes",)}
  files.refuse_foreign("--workdir", workdir, ours)
  workdir.mkdir(parents=True, exist_ok=True)
  # Seeds share their programs, and so do an interrupted demo and the next.
  jax.config.update("jax_compilation_cache_dir", str(workdir / "compiled"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  facts: dict[str, Any] = environment.facts()
  print(f"{facts['hardware']}; Python {facts['python']}, jax {facts['jax']}")
  runs, looks = [], []
  wanted = list(_configs(options))
  for number, (scheme, seed, config) in enumerate(wanted, 1):
    steps = config.train.steps
    shorter = "" if steps == options.steps else f"_{steps}"
    folder = workdir / f"{scheme}_{seed}{shorter}"
    print(
      f"\n[{number}/{len(wanted)}] {figures.name_of(scheme)}, seed {seed},"
      f" {steps} steps"
    )
    summary = loop.train_and_evaluate(config, folder)
    if summary["status"] == "stopped":
      raise KeyboardInterrupt
    look = inspection.inspect_once(
      # The report shows one sample per scheme.
      folder, options.prompt, with_sample=seed == 0 and not shorter
    )  # fmt: skip
    looks.append(look)
    runs.append(
      results.load_run(folder, scheme, seed, summary, look.validation)
    )
    print(
      f"      validation loss {look.validation['loss']:.4f} nats per byte"
      f"  ({time.perf_counter() - start:.0f} s so far)"
    )

  print("\nTiming the training steps in turn ...", flush=True)
  step_times = step_time.measure(
    {scheme: demo_config(scheme, 0, steps=options.steps) for scheme in SCHEMES}
  )
  facts |= {
    "corpus": results.corpus(workdir / f"{SCHEMES[0]}_0"),
    "wall_clock_seconds": round(time.perf_counter() - start),
  }
  config = wanted[0][2]
  names = ("corpus", "hardware", "python", "jax", "commit")
  rows = results.rows(runs, step_times, {name: facts[name] for name in names})
  csv_rows.write(workdir / "results.csv", rows)
  page = report.render(
    config=config, runs=runs, looks=looks, rows=rows, facts=facts
  )
  files.write(workdir / "report.html", page)
  print()
  print(results.markdown(rows))
  print(f"Open {workdir / 'report.html'} in a browser.")


def _configs(
  options: argparse.Namespace,
) -> Iterator[tuple[str, int, config_lib.RunConfig]]:
  # Seed by seed, so that an unfinished demo compares what it can.
  for seed in range(options.seeds):
    for scheme in SCHEMES:
      yield scheme, seed, demo_config(scheme, seed, steps=options.steps)
    # How PreNorm's loss falls with steps, for the gain in steps.
    for part in _PARTS:
      steps = max(1, options.steps // part)
      yield SCHEMES[0], seed, demo_config(SCHEMES[0], seed, steps=steps)


def _parse_options() -> argparse.Namespace:
  parser = command_line.Parser("python -m experiments.demo.run", __doc__)
  parser.add_argument(
    "--workdir", default="runs/demo", help="folder to write to"
  )
  parser.add_argument("--seeds", type=int, default=2, help="runs per scheme")
  parser.add_argument("--steps", type=int, default=640, help="steps per run")
  parser.add_argument(
    "--prompt", default="def ", help="prompt of the text samples"
  )
  return parser.parse_args()


if __name__ == "__main__":
  sys.exit(main())
