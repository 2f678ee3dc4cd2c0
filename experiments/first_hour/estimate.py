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
from attnres_jax.common import sharding
from attnres_jax.common import text_table
from attnres_jax.common import topology
from attnres_jax.config import MeshConfig
from attnres_jax.plan import attribution
from attnres_jax.plan import gpu
from attnres_jax.plan import hlo
from experiments.cost import compiled as compiled_lib
from experiments.cost import networks

FIELDS = "network", "arm", "GB", "TFLOP", "launches", "peak_GB", "ms"


def make_parser() -> command_line.Parser:
  parser = command_line.Parser(
    "python -m experiments.first_hour.estimate", __doc__
  )
  parser.add_argument("network", help="of experiments.cost, such as d1024")
  parser.add_argument("arms", nargs="+", help="such as block_attnres")
  parser.add_argument("--parts", action="store_true", help="GB of each part")
  return parser


def main(argv: Sequence[str] | None = None) -> int:
  options = make_parser().parse_args(argv)
  return command_line.run(_print, options)


def _print(options) -> int:
  jax.config.update("jax_platforms", "cpu")
  device = topology.devices("h100-1")[0]
  rows, parts = [], []
  for arm in options.arms:
    compiled = compile_step(options.network, arm, device)
    program = hlo.Program(str(compiled.as_text()))
    row = gpu.of_program(program, topology.chip(device), device.device_kind)
    rows.append((
      options.network, arm, f"{program.hbm_bytes() / 1e9:.2f}",
      f"{program.flops() / 1e12:.2f}", f"{row['launches']:.0f}",
      f"{compiler.peak_bytes(compiled) / 1e9:.2f}",
      f"{1e3 * gpu.step_seconds(row):.2f}",
    ))  # fmt: skip
    parts += [
      (arm, part, f"{cost.moved_bytes / 1e9:.2f}")
      for part, cost in attribution.costs(program).items()
    ]
  print(text_table.table(FIELDS, rows))
  if options.parts:
    print(text_table.table(("arm", "part", "GB"), parts))
  return 0


def compile_step(network: str, arm: str, device):
  """The compiled gradient of a loss, as `measure.steps` runs it."""
  loaded = networks.load(network)
  function, arguments = compiled_lib.step(loaded, arm)
  place = jax.sharding.SingleDeviceSharding(device)
  arguments = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments
  )
  # Kernels are chosen for the GPU of the ambient mesh.
  mesh = sharding.make_mesh(MeshConfig(data=1), [device])
  with jax.set_mesh(mesh):
    staged = jax.jit(function).trace(*arguments)
  return staged.lower().compile(gpus.COMPILER_OPTIONS)


if __name__ == "__main__":
  sys.exit(main())
