# SPDX-License-Identifier: Apache-2.0
"""The first hour on hardware: what is claimed, measured on the device at hand.

  python -m experiments.first_hour [--out=runs/first_hour] [--minutes=60]
  python -m experiments.first_hour --platform=cpu

On a TPU or GPU it runs, in the order of what they tell: the rates of the
device, every kernel against its reference, steps over PreNorm, a planned
network against its prediction, the shapes of the static tables beside their
estimates, a traced run, and on a GPU the benchmark with its peers. It writes
rows.csv and page.html as it goes. A task for which too little time is left is
skipped. Rerun the same command to continue; rows of another device or commit
are refused. On a CPU it runs in a short form, which tries everything and
decides nothing about accelerators.
"""

import argparse
from collections.abc import Mapping, Sequence
import functools
import os
import pathlib
import sys

from attnres_jax import command_line
from attnres_jax import config as config_lib
from attnres_jax import files
from experiments.first_hour import budget
from experiments.first_hour import checks
from experiments.first_hour import claims
from experiments.first_hour import machine
from experiments.first_hour import operators
from experiments.first_hour import peers
from experiments.first_hour import report
from experiments.first_hour import rows as rows_lib
from experiments.first_hour import steps
from experiments.first_hour import summary
from experiments.first_hour import tables
from experiments.first_hour import training
from experiments.pages import readme

# The estimates that the hour tests.
PUBLISHED = readme.Published(
  pathlib.Path(__file__).parent,
  [
    readme.Place(make, name, "", f"../../{tables.DOCUMENT}")
    for name, make in {"summary": summary.of_kernels, **tables.PLACES}.items()
  ],
)

_START_SECONDS = 300.0
PLATFORMS = ("", "cpu", "tpu", "gpu")


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  return command_line.run(_main, make_parser().parse_args(argv))


def make_parser() -> argparse.ArgumentParser:
  """Of the command's arguments."""
  parser = command_line.Parser("python -m experiments.first_hour", __doc__)
  parser.add_argument("--out", default="runs/first_hour", help="folder")
  parser.add_argument("--minutes", type=float, default=60.0)
  parser.add_argument(
    "--platform",
    default="",
    choices=PLATFORMS,
    help="that JAX must use; by default what it finds",
  )
  parser.add_argument(
    "--parts", default="", help="comma-separated, of: " + ", ".join(PARTS)
  )
  return parser


PARTS = (
  machine.PART, checks.PART, steps.PART, training.PART, operators.PART,
  peers.PART,
)  # fmt: skip


def _main(options: argparse.Namespace) -> None:
  if not options.minutes > 0:
    config_lib.fail_argument("--minutes", options.minutes, "more than 0")
  parts = options.parts.split(",") if options.parts else PARTS
  for part in parts:
    config_lib.choose("--parts", part, dict.fromkeys(PARTS))
  folder = pathlib.Path(options.out)
  folder.mkdir(parents=True, exist_ok=True)
  device = budget.Process(functools.partial(_prepare, options.platform))
  try:
    hour(device, folder.absolute(), options.minutes * 60, parts)
  finally:
    device.close()


def hour(
  device: budget.Runner,
  folder: pathlib.Path,
  seconds: float,
  parts: Sequence[str] = PARTS,
) -> list[claims.Verdict]:
  """Runs what is left, and writes rows and page.

  Raises:
    ConfigError: the folder has rows of another device or commit.
    RunError: there is no device.
  """
  try:
    facts = device.run(machine.facts, min(seconds, _START_SECONDS))
  except budget.Failure as failure:
    raise config_lib.RunError(f"no device: {failure}") from None
  short = facts["platform"] == "cpu"
  facts["form"] = "short" if short else "full"
  ledger = rows_lib.Ledger(folder / "rows.csv", facts)
  todo = tasks(facts["platform"], short, folder)

  def tell(line: str) -> None:
    print(line, flush=True)
    files.write(folder / "page.html", page(ledger, facts))

  chosen = [task for task in todo if task.part in parts]
  budget.run(chosen, ledger, device, seconds, tell=tell)
  found = claims.verdicts(ledger.rows, facts["platform"], facts["kind"])
  files.write(folder / "page.html", page(ledger, facts))
  numbers = claims.counts(found)
  print(
    ", ".join(f"{number} {outcome}" for outcome, number in numbers.items())
    + f": {folder / 'page.html'}"
  )
  return found


def page(ledger: rows_lib.Ledger, facts: Mapping[str, str]) -> str:
  """The page of the rows so far."""
  found = claims.verdicts(ledger.rows, facts["platform"], facts["kind"])
  return report.render(ledger.rows, found, facts)


def tasks(
  platform: str, short: bool, folder: pathlib.Path
) -> list[budget.Task]:
  """All of them, in the order of what they tell.

  First what every later number depends on, then one number for each claim of
  the README, then the tables.
  """
  of_checks = checks.tasks(platform, short)
  kernels = [task for task in of_checks if "pallas" in task.name]
  of_steps = steps.tasks(platform, short)
  of_training = training.tasks(short, folder)
  of_operators = operators.tasks(platform, short)
  of_peers = peers.tasks(platform, short)
  return [
    *machine.tasks(),
    *kernels,
    *of_steps[:2],
    of_training[0],
    *of_operators[:12],
    of_training[-1],
    *of_peers,
    *of_training[1:-1],
    *of_operators[12:],
    *of_steps[2:],
    *(task for task in of_checks if task not in kernels),
  ]


def _prepare(platform: str) -> None:
  """Called in the process of the device, before JAX starts."""
  # PyTorch and JAX share the memory of a GPU.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  import jax

  if platform:
    name = {"gpu": "cuda,cpu", "tpu": "tpu,cpu"}.get(platform, platform)
    jax.config.update("jax_platforms", name)


if __name__ == "__main__":
  sys.exit(main())
