# SPDX-License-Identifier: Apache-2.0
r"""The GPU kernels, compiled for an H100 on a machine without one.

  python -m experiments.first_hour.gpu_static \
    --out=kernels/benchmarks/results/gpu_static.csv

Needs `pip install 'attnres-jax[gpu-plan]'`. A row is one pass of an operator at
one shape: launches, bytes that they move and have to move, and of its kernels
the most registers of a thread, spilled bytes, barriers and the bits of the
widest load in the code. Nothing is timed. Every row is compiled in a process of
its own, as the assembler only prints.
"""

import argparse
from collections.abc import Sequence
import functools
import importlib
import itertools
import os
import pathlib
import re
import subprocess
import sys

from attnres_jax.common import command_line
from attnres_jax.common import csv_rows
from attnres_jax.common import environment

_NAME = "experiments.first_hour.gpu_static"
_ROOT = pathlib.Path(__file__).absolute().parents[2]
# (operator, queries, sources, width), at 8192 tokens. Sources of a merge are
# partial sums.
SHAPES = (
  ("depth_attention", 1, 9, 2304),
  ("depth_attention", 3, 8, 1024),
  ("depth_attention", 6, 9, 2304),
  ("depth_attention", 8, 8, 1168),
  ("depth_attention", 8, 9, 2304),
  ("depth_merge_norm", 1, 1, 1024),
  ("depth_merge_norm", 1, 1, 2304),
  ("depth_merge_norm", 1, 7, 1024),
  ("depth_merge_norm", 1, 7, 2304),
)
PASSES = "forward", "backward"
TOKENS = 8192
_KEY = "operator", "pass", "queries", "sources", "tokens", "width"


def measure(operator, direction, queries, sources, width):
  """The row of one pass, from the output of a process that compiles it."""
  given = operator, direction, *map(str, (queries, sources, width))
  dumps = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_PTX": "1"}
  here = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{_ROOT / 'kernels'}"}
  done = subprocess.run(
    [sys.executable, "-m", _NAME, "--compile", *given],
    cwd=_ROOT, env=os.environ | dumps | here, capture_output=True, timeout=900,
  )  # fmt: skip
  text = (done.stdout + done.stderr).decode(errors="replace")
  if done.returncode:
    raise RuntimeError(text[-2000:])
  numbers = lambda pattern: [int(x) for x in re.findall(pattern, text)]
  loads = re.findall(r"\bld(?:\.global)?\S*?(?:\.v(\d))?\.[bfsu](\d+)", text)
  ((launches, moved, version),) = re.findall(
    r"^RESULT (\d+) (\d+) (\S+)$", text, re.MULTILINE
  )
  merges = operator == "depth_merge_norm"  # With the mixture.
  passes = 1 + (direction == "backward")
  arrays = queries + passes * (sources + merges)
  key = operator, direction, queries, sources, TOKENS, width
  return dict(zip(_KEY, key)) | {
    "launches": launches,
    "GB": f"{int(moved) / 1e9:.3f}",
    "least_GB": f"{2 * arrays * TOKENS * width / 1e9:.3f}",
    "registers": max(numbers(r"Used (\d+) registers"), default=""),
    "spilled_bytes": sum(numbers(r"(\d+) bytes spill stores")),
    "barriers": len(re.findall(r"\bbar(?:rier)?\.(?:cta\.)?sync", text)),
    "load_bits": max((int(v or 1) * int(b) for v, b in loads), default=""),
    "chip": "h100",
    "jax": version,
    "commit": environment.commit(),
  }


def compile_pass(operator, direction, queries, sources, width):
  """Compiles one pass, and prints launches, bytes and the version of jax."""
  import jax

  from attnres_jax.common import gpus
  from attnres_jax.common import topology
  from attnres_jax.plan import hlo

  place = jax.sharding.SingleDeviceSharding(topology.devices("h100-1")[0])

  def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

  wide, row = struct(TOKENS, width), struct(width, dtype="float32")
  if operator == "depth_attention":
    numbers = struct(queries, TOKENS, dtype="float32")
    arguments = struct(queries, width, dtype="float32"), (wide,) * sources
    cotangents = numbers, (wide,) * queries, numbers
    options = dict(eps=1e-6)
  else:
    partials = (wide,) * sources
    arguments = wide, struct(TOKENS, dtype="float32"), row, partials, row
    cotangents = (wide,)
    options = dict(eps=1e-6, norm_eps=1e-6)
  name = operator.removesuffix("_norm")
  backend = importlib.import_module(f"attnres_kernels.{name}.pallas_gpu")
  if direction == "backward":
    arguments += cotangents
  run = functools.partial(getattr(backend, direction), **options)
  lowered = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",))
  compiled = lowered.compile(gpus.COMPILER_OPTIONS)
  program = hlo.Program(str(compiled.as_text()))
  launches = sum(count for count, _, _ in program.instructions())
  print(f"\nRESULT {launches} {program.hbm_bytes():.0f} {jax.__version__}")


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = command_line.Parser(f"python -m {_NAME}", __doc__)
  add = parser.add_argument
  add("--out", default="gpu_static.csv", help="file of rows")
  add("--compile", nargs=5, help=argparse.SUPPRESS)
  return command_line.run(_run, parser.parse_args(argv))


def _run(options: argparse.Namespace) -> None:
  if options.compile:
    operator, direction, *numbers = options.compile
    compile_pass(operator, direction, *map(int, numbers))
    return
  for (operator, *numbers), direction in itertools.product(SHAPES, PASSES):
    row = measure(operator, direction, *numbers)
    csv_rows.put(options.out, row, _KEY)
    print(row, flush=True)


if __name__ == "__main__":
  sys.exit(main())
