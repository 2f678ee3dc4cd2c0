# SPDX-License-Identifier: Apache-2.0
r"""Whether a config fits a pod, what bounds its step, and what it sends.

  python -m attnres_jax.plan --config=configs/lm.py:size=large \
    --config.mesh.data=1 --config.mesh.fsdp=16 --topology=v5e:4x4
  python -m attnres_jax.plan ... --topology=v5p-128 --num_slices=2
  python -m attnres_jax.plan ... --step=decode
  python -m attnres_jax.plan ... --until=schedule

GPUs are h100-1, h100-8, h200-8 and b200-8; h100-8x8 is eight hosts of eight.
They need `pip install 'attnres-jax[gpu-plan]'`, and no GPU.

With --until=schedule, the compiler is stopped before it writes machine code,
which takes most of its time. Everything is reported but the size of the program
itself.

Takes the same `--config` flags as training. Exit status 1 means that it does
not fit.
"""

import argparse
from collections.abc import Sequence
import sys

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import plans
from attnres_jax.common import topology
from attnres_jax.config import fields


def main(argv: Sequence[str] | None = None) -> int:
  """Compiles and prints; the exit status says whether it fits."""
  return command_line.run(_report, make_parser().parse_args(argv))


def make_parser() -> command_line.Parser:
  parser = command_line.Parser("python -m attnres_jax.plan", __doc__)
  add = parser.add_argument
  parser.add_config()
  add(
    "--topology",
    help="TPU slice, such as v5e:4x4 or v5e-16, or GPUs: h100-8, h200-8x8",
  )
  add(
    "--num_slices",
    type=fields.Size,
    default=1,
    help="slices, connected by the data center network",
  )
  add(
    "--step",
    default="train",
    choices=("train", "decode"),
    help="what to compile",
  )
  add(
    "--until",
    default="code",
    choices=("code", "schedule"),
    when=("step", ("train",)),
    help="where to stop the compiler",
  )
  parser.add_plans()
  return parser


def _report(options: argparse.Namespace) -> int:
  if not options.topology:
    raise config_lib.ConfigError(
      "--topology: missing, expected a slice such as v5e:4x4, or h100-8"
    )
  config = command_line.load_config(options.config)
  import jax

  from attnres_jax.plan import report
  from attnres_jax.plan import text as text_lib

  # The program is compiled for the topology; nothing runs.
  jax.config.update("jax_platforms", "cpu")
  slices = options.topology, options.num_slices
  devices = topology.devices(*slices)
  config = plans.resolve(config, devices, options.plans)
  if options.until == "schedule":
    plan = report.make_schedule_report(config, *slices)
  else:
    plan = report.make_report(config, devices, options.step)
  print(text_lib.to_text(plan))
  return 0 if plan["fits"] else 1


if __name__ == "__main__":
  sys.exit(main())
