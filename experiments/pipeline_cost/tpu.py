# SPDX-License-Identifier: Apache-2.0
"""A pipelined step of the 48B network, compiled for a slice of v5p.

  python -m experiments.pipeline_cost.tpu --size=48b
  python -m experiments.pipeline_cost.tpu --size=48b --residual=prenorm
  python -m experiments.pipeline_cost.tpu --size=4_layers --rule=cached

Writes a row of `tpu.csv` beside this file, replacing that of the same size,
scheme and rule, and prints the report of `attnres_jax.aot`. It needs libtpu but
no device; `processor_seconds` says how long it takes, and a 48B network needs 8
GB of memory. The compiler is stopped before it writes machine code, so `peak`
is that of all arrays.

Everything is per device. Times are the lower bounds of `attnres_jax.aot`:
FLOPs, bytes of memory and bytes on links, each at its peak rate, in the mean
over ranks. In `lockstep_seconds` every tick takes as long as its slowest rank
(`attnres_jax.aot.lockstep`), and `bubble` is what ranks wait, over their work.
`vector_MiB` is one [tokens, width] of a microbatch; `inputs`, `blocks` and
`gradients` are the planned slots for running states (float32), block
representations, and their gradients (float32). `sent` lists the gigabytes that
a step sends within loops, by collective and axes, and the fraction that is
overlapped; `sent_once` those outside of loops.
"""

import argparse
from collections.abc import Sequence
import os
import pathlib
import sys
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

import jax.numpy as jnp

from attnres_jax import command_line
from attnres_jax import config as config_lib
from attnres_jax import csv_rows
from attnres_jax import environment
from attnres_jax import sharding
from attnres_jax.aot import report as report_lib
from attnres_jax.aot import topology
from experiments.pipeline_cost import programs

FILE = pathlib.Path(__file__).with_name("tpu.csv")
Row = dict[str, Any]


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
  """The columns that identify a row."""
  fields = size.fields | {"pipeline.rule": rule}
  return config_lib.load_config(f"{size.config},residual={residual}", fields)


def make_row(config: config_lib.RunConfig, report: Row, devices: Any) -> Row:
  """The figures of a report about a pipeline, and of its plan."""
  pipeline = programs.make_pipeline(config, devices)
  mesh, stage = pipeline.placement.mesh, pipeline.stage
  block, length = stage.transport.block, config.data.sequence_length
  rows = config.data.batch_size // config.pipeline.microbatches
  rows //= sharding.num_row_shards(mesh)
  vector = rows * length * config.model.width
  vector *= jnp.dtype(config.model.dtype).itemsize
  row: Row = dict(
    devices=report["devices"],
    mesh=" ".join(f"{a}={n}" for a, n in report["mesh"].items() if n > 1),
    V=config.pipeline.virtual_stages,
    M=config.pipeline.microbatches,
    rows=rows,
    vector_MiB=vector / 2**20,
    inputs=stage.inputs.size,
    blocks=stage.blocks.size if block is not None else 0,
    gradients=stage.gradients.size if block is not None else 0,
    fits=report["fits"],
  )
  for name in ("parameter", "optimiser", "peak", "headroom"):
    bytes_ = report.get(f"{name}_bytes")
    row[f"{name}_GiB"] = None if bytes_ is None else round(bytes_ / 2**30, 3)
  for name in ("compute", "memory", "link"):
    seconds = report.get(f"{name}_seconds")
    row[f"{name}_seconds"] = None if seconds is None else round(seconds, 3)
  lockstep = report.get("lockstep", {})
  for column, name in (("lockstep_seconds", "seconds"), ("bubble", "bubble")):
    row[column] = round(lockstep[name], 3) if lockstep else None
  for column, in_loop in (("sent", True), ("sent_once", False)):
    row[column] = "; ".join(
      f"{one['kind']} {one['axes']} {one['sent_bytes'] / 1e9:.2f}"
      f" ({one['overlapped_bytes'] / one['sent_bytes']:.0%})"
      for one in report.get("collectives", ())
      if one["in_loop"] == in_loop and one["sent_bytes"]
    )
  return row


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  return command_line.run(_run, _parser().parse_args(argv))


def _run(options: argparse.Namespace) -> None:
  size = SIZES[options.size]
  config = make_config(size, options.residual, options.rule)
  devices = topology.devices(size.topology)
  start = os.times()
  report = report_lib.make_schedule_report(config, size.topology)
  # With that of the process that compiles.
  seconds = sum(os.times()[:4]) - sum(start[:4])
  print(report_lib.to_text(report))
  row = vars(options) | dict(compiled_for=size.topology)
  row |= make_row(config, report, devices)
  row |= dict(
    compile_seconds=round(report.get("compile_seconds", 0)),
    processor_seconds=round(seconds),
  )
  csv_rows.put(FILE, row | environment.facts(), tuple(vars(options)))


def _parser() -> command_line.Parser:
  parser = command_line.Parser(
    "python -m experiments.pipeline_cost.tpu", __doc__
  )
  parser.add_argument(
    "--size", default="48b", choices=list(SIZES), help="network and slice"
  )
  parser.add_argument("--residual", default="block_attnres", help="scheme")
  parser.add_argument("--rule", default="minimum", help="which blocks are sent")
  return parser


if __name__ == "__main__":
  sys.exit(main())
