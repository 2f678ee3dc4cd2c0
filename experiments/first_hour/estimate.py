# SPDX-License-Identifier: Apache-2.0
r"""Estimates of training steps on an H100, without one.

  python -m experiments.first_hour.estimate d1024 prenorm block_attnres

compiles the step of each arm of a network of `experiments.cost` and prints its
bytes, products, launches and estimate. Needs the extra gpu-plan. Beside the
file of measured rows, the README has both.
"""

from collections.abc import Sequence
import sys

import jax

from attnres_jax.common import command_line
from attnres_jax.common import compiler
from attnres_jax.common import gpus
from attnres_jax.common import text_table
from attnres_jax.common import topology
from attnres_jax.plan import gpu
from attnres_jax.plan import hlo
from experiments.cost import compiled as compiled_lib
from experiments.cost import networks

FIELDS = "network", "arm", "GB", "TFLOP", "launches", "peak_GB", "ms"


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = command_line.Parser(
    "python -m experiments.first_hour.estimate", __doc__
  )
  parser.add_argument("network", help="of experiments.cost, such as d1024")
  parser.add_argument("arms", nargs="+", help="such as block_attnres")
  return command_line.run(_print, parser.parse_args(argv))


def _print(options) -> None:
  jax.config.update("jax_platforms", "cpu")
  network, rows = networks.load(options.network), []
  for arm in options.arms:
    case = compiled_lib.Case(
      "step", "h100-1", options.network, arm, network.batch, network.tokens
    )
    staged, (device,) = compiled_lib.trace(case)
    compiled = staged.lower().compile(gpus.COMPILER_OPTIONS)
    program = hlo.Program(str(compiled.as_text()))
    row = gpu.of_program(program, topology.chip(device), device.device_kind)
    rows.append((
      options.network, arm, f"{program.hbm_bytes() / 1e9:.2f}",
      f"{program.flops() / 1e12:.2f}", f"{row['launches']:.0f}",
      f"{compiler.peak_bytes(compiled) / 1e9:.2f}",
      f"{1e3 * gpu.step_seconds(row):.2f}",
    ))  # fmt: skip
  print(text_table.table(FIELDS, rows))


if __name__ == "__main__":
  sys.exit(main())
