# SPDX-License-Identifier: Apache-2.0
"""A pipelined step of the 48B network, compiled for a slice of v5p.

  python -m experiments.pipeline_cost.tpu --size=48b
  python -m experiments.pipeline_cost.tpu --size=4_layers --rule=cached

Prints the report of `attnres_jax.plan` and puts a row into tpu.csv, in place of
the row with the same size, scheme and rule. It needs libtpu and no device; the
48B network takes three minutes of processor time and 8 GB of memory.

Figures are per device, in the mean over ranks. `compute`, `memory` and `link`
are lower bounds in seconds. In `lockstep`, every tick takes as long as its
slowest rank; `bubble` is the time that ranks wait, over their work.
"""

import argparse
from collections.abc import Sequence
import os
import pathlib
import sys
from typing import NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import csv_rows
from attnres_jax.common import environment
from attnres_jax.plan import report as report_lib
from experiments.pages import readme

FILE = pathlib.Path(__file__).with_name("tpu.csv")
_GIB = ("parameter", "optimiser", "peak", "headroom")
_SECONDS = ("compute", "memory", "link", "lockstep")


class Size(NamedTuple):
  """A network on a slice; a microbatch has 4 rows of 4096 tokens per device."""

  config: str
  topology: str
  fields: dict[str, int | str]


SIZES = {
  # Ranks small enough to hold their whole weights and gradients.
  "48b": Size(
    "configs/kimi_linear.py:size=48b",
    "v5p:4x4x4",
    {
      "mesh.data": 1,
      "mesh.stage": 8,
      "mesh.expert": 8,
      "pipeline.virtual_stages": 2,
      "pipeline.microbatches": 64,
      "pipeline.gather": "step",
    },
  ),
  # Its width and heads, an eighth of its depth, a quarter of its experts;
  # blocks of two sublayers, so that there are five sources at the end.
  "4_layers": Size(
    "configs/kimi_linear.py:size=48b,experts=64",
    "v5p:2x2x1",
    {
      "model.num_layers": 4,
      "model.residual.block_size": 2,
      "mesh.data": 1,
      "mesh.stage": 2,
      "mesh.expert": 2,
      "pipeline.virtual_stages": 2,
      "pipeline.microbatches": 4,
      "data.batch_size": 32,
    },
  ),
}


def make_config(size: Size, residual: str, rule: str) -> config_lib.RunConfig:
  """The run of a row."""
  fields = size.fields | {"pipeline.rule": rule}
  return config_lib.load_config(f"{size.config},residual={residual}", fields)


def table(size: str, rows: readme.Rows) -> str:
  """Memory and bounds of a size on a slice; a row per scheme and rule."""
  rows = [row for row in rows if row["size"] == size]
  baseline = next(row for row in rows if row["residual"] == "prenorm")
  lines = []
  for row in rows:
    # PreNorm has no blocks to which a rule could apply.
    rule = "" if row is baseline else f", {row['rule']}"
    cells = [row["residual"] + rule]
    cells += [f"{float(row[f'{name}_GiB']):.2f}" for name in _GIB]
    for name in _SECONDS:
      seconds, of = (float(one[f"{name}_seconds"]) for one in (row, baseline))
      cells.append(f"{seconds:.3f} ({seconds / of:.3f})")
    lines.append([*cells, f"{float(row['bubble']):.0%}"])
  header = [f"{name}, GiB" for name in _GIB]
  header += [f"{name}, s" for name in _SECONDS]
  table = readme.table(["", *header, "bubble"], lines)
  return readme.with_origin(table, rows)


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  parser = command_line.Parser(
    "python -m experiments.pipeline_cost.tpu", __doc__
  )
  add = parser.add_argument
  add("--size", default="48b", choices=list(SIZES), help="network and slice")
  add("--residual", default="block_attnres", help="residual scheme")
  add("--rule", default="minimum", help="which blocks are sent")
  return command_line.run(_run, parser.parse_args(argv))


def _run(options: argparse.Namespace) -> None:
  size = SIZES[options.size]
  config = make_config(size, options.residual, options.rule)
  report = report_lib.make_schedule_report(config, size.topology)
  print(report_lib.to_text(report))
  if "reason" in report:
    raise config_lib.RunError("the compiler refused the program: no row")
  lockstep = report.get("lockstep", {})
  row = vars(options) | dict(
    compiled_for=size.topology, devices=report["devices"], fits=report["fits"]
  )
  row |= {f"{n}_GiB": round(report[f"{n}_bytes"] / 2**30, 3) for n in _GIB}
  row |= {
    f"{n}_seconds": round(
      lockstep["seconds"] if n == "lockstep" else report[f"{n}_seconds"], 3
    )
    for n in _SECONDS
  }
  row["bubble"] = round(lockstep["bubble"], 3)
  csv_rows.put(FILE, row | environment.facts(), tuple(vars(options)))


if __name__ == "__main__":
  sys.exit(main())
