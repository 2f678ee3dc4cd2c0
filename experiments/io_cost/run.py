# SPDX-License-Identifier: Apache-2.0
"""How many vectors a token moves per sublayer: Table 1, and our programs.

  python -m experiments.io_cost.run

Writes a row per network and scheme to `results.csv` beside this file, and fills
the README and the figure from these rows. Nothing is run: the numbers are
counted in the programs of the schemes.
"""

import argparse
from collections.abc import Sequence
import pathlib
import sys
from typing import Any, NamedTuple

import tqdm

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import csv_rows
from attnres_jax.common import environment
from attnres_jax.flops import traffic
from attnres_jax.models import residuals
from attnres_jax.scaling import paper
from experiments import publish
from experiments.io_cost import report
from experiments.pages import readme

_RESULTS = pathlib.Path(__file__).absolute().with_name("results.csv")
PUBLISHED = readme.Published(
  _RESULTS.parent,
  [readme.Place(report.table)],
  {"vectors.svg": report.figure},
)


class Depth(NamedTuple):
  """A network, as far as its residual scheme is concerned.

  Attributes:
    label: in tables.
    sublayers: L.
    block_size: S, sublayers per block (Block) or per segment (Full).
  """

  label: str
  sublayers: int
  block_size: int


DEPTHS = {
  "typical": Depth("Table 1", 128, 16),
  "436m": Depth("Table 2, 436M", 32, 4),
  "48b": Depth("48B", 54, 6),
  "k3": Depth("Kimi K3", 186, 24),
}
STREAMS = 4
TABLE_1 = {row.scheme: row for row in paper.TABLE_1}


def row(depth: str, scheme: str) -> dict[str, Any]:
  """Vectors per token and sublayer; `printed` is the formula of Table 1."""
  size = DEPTHS[depth]
  residual = config_lib.ResidualConfig(
    name=scheme,
    block_size=size.block_size,
    schedule_size=size.block_size,
    streams=STREAMS,
  )
  moved = traffic.of_scheme(
    config_lib.ModelConfig(
      num_layers=size.sublayers // 2, dtype="bfloat16", residual=residual
    )
  )
  printed, blocks = "", -(-size.sublayers // size.block_size)
  if scheme in TABLE_1:
    shape = size.sublayers, blocks, size.block_size, STREAMS
    printed = f"{TABLE_1[scheme].widths(*shape):.4f}"
  return {
    "depth": depth,
    "scheme": scheme,
    "sublayers": size.sublayers,
    "block_size": size.block_size,
    "printed": printed,
    "reads": f"{moved.reads:.4f}",
    "writes": f"{moved.writes:.4f}",
  }


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = command_line.Parser("python -m experiments.io_cost.run", __doc__)
  return command_line.run(_main, parser.parse_args(argv))


def _main(options: argparse.Namespace) -> None:
  del options
  wanted = [("typical", name) for name in residuals.RESIDUALS] + [
    (depth, name) for depth in list(DEPTHS)[1:] for name in TABLE_1
  ]
  origin = environment.facts()
  rows = [row(*one) | origin for one in tqdm.tqdm(wanted, unit="row")]
  csv_rows.write(_RESULTS, rows)
  publish.publish(PUBLISHED)


if __name__ == "__main__":
  sys.exit(main())
