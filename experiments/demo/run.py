# SPDX-License-Identifier: Apache-2.0
"""Trains four residual schemes side by side on real text and reports.

  make demo
  python -m experiments.demo.run

The schemes see the same data in the same order, start from the same weights and
share every hyper-parameter. The text is one that every machine has: the
standard library of the running Python. Rerun the same command to resume an
interrupted demo; finished runs are not repeated.

Writes report.html (one file, works offline) and results.csv to --workdir.
"""

import argparse
from collections.abc import Iterator
import itertools
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


PUBLISHED = readme.Published(
  pathlib.Path(__file__).parent,
  [readme.Place(results.markdown)],
)


def main() -> int:
  """Runs the command; returns its exit status."""
  return command_line.run(_run, _parse_options())


def demo_config(scheme: str, seed: int, *, steps: int) -> config_lib.RunConfig:
  """The run of one scheme and seed; only the residual differs within a seed.

  The protocol of experiments/noise, with fewer steps: small batches, a rate
  that falls to zero, the whole validation split.
  """
  overrides = {
    "name": f"demo_{scheme}_{seed}",
    "seed": seed,
    "data.seed": seed,
    "optim.warmup_steps": max(1, steps // 10),
    "train.steps": steps,
    "train.log_every": max(1, steps // 40),
    "train.eval_every": max(1, steps // 2),
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
  total = options.seeds * len(SCHEMES)
  for number, (scheme, seed, config) in enumerate(_configs(options), 1):
    folder = workdir / f"{scheme}_{seed}"
    print(f"\n[{number}/{total}] {figures.name_of(scheme)}, seed {seed}")
    summary = loop.train_and_evaluate(config, folder)
    if summary["status"] == "stopped":
      raise KeyboardInterrupt
    runs.append(results.load_run(folder, scheme, seed, summary))
    looks.append(
      # The report shows one sample per scheme.
      inspection.inspect_once(folder, options.prompt, with_sample=seed == 0)
    )
    print(
      f"      validation loss {runs[-1].validation[1][-1]:.4f} nats per byte"
      f"  ({time.perf_counter() - start:.0f} s so far)"
    )

  print("\nTiming the training steps in turn ...", flush=True)
  seconds = step_time.measure(
    {scheme: config for scheme, _, config in _configs(options)}
  )
  facts |= {
    "corpus": results.corpus(workdir / f"{SCHEMES[0]}_0"),
    "wall_clock_seconds": round(time.perf_counter() - start),
  }
  _, _, config = next(_configs(options))
  names = ("corpus", "hardware", "python", "jax", "commit")
  rows = results.rows(runs, seconds, {name: facts[name] for name in names})
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
  for seed, scheme in itertools.product(range(options.seeds), SCHEMES):
    yield scheme, seed, demo_config(scheme, seed, steps=options.steps)


def _parse_options() -> argparse.Namespace:
  parser = command_line.Parser("python -m experiments.demo.run", __doc__)
  parser.add_argument(
    "--workdir", default="runs/demo", help="folder to write to"
  )
  parser.add_argument("--seeds", type=int, default=2, help="runs per scheme")
  parser.add_argument("--steps", type=int, default=640, help="per run")
  parser.add_argument(
    "--prompt", default="def ", help="prompt of the text samples"
  )
  return parser.parse_args()


if __name__ == "__main__":
  sys.exit(main())
