# SPDX-License-Identifier: Apache-2.0
"""One token, and a whole prompt, compiled for TPUs that are not there.

The programs of the engine: the next token of all slots, whose caches are full
(`decode`), or a prompt as one chunk (`prefill`). Bytes are what the
instructions of the compiled program read from and write to memory. The estimate
is the compiler's cycles for its own instructions. It has none for Pallas
kernels: each of these gets the time of the compiler's smallest fusions, 1.21
us, and that of the bytes of all its operands, even of those that are on the
core. The share is that of depth attention in the estimate, with the norms that
are part of its kernel.

  python -m experiments.decode_cost.tpu decode --chips v5e --batches 1,8,64
  python -m experiments.decode_cost.tpu prefill --chips v5e --contexts 4096

Rows are added to tpu.csv, so that it can be built in pieces. A program takes
half a minute of one core.
"""

import dataclasses
import itertools
import os
import pathlib
import re
import sys
import time
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.common import chips
from attnres_jax.common import command_line
from attnres_jax.common import csv_rows
from attnres_jax.common import environment
from attnres_jax.common import scopes
from attnres_jax.common import sharding
from attnres_jax.inference import programs
from attnres_jax.plan import attribution
from attnres_jax.plan import hlo
from attnres_jax.plan import topology

TABLE = pathlib.Path(__file__).with_suffix(".csv")
KEYS = ("step", "chip", "batch", "context", "scheme")
TOPOLOGY = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
SCHEMES = ("prenorm", "block_attnres", "full_attnres")

# 24 sublayers in 8 blocks. Outside of scans, which is the faster form of all
# three. Grouped queries, since caches of all heads would not fit.
CONFIG = config_lib.ModelConfig(
  vocab_size=32768,
  width=2048,
  num_layers=12,
  num_heads=16,
  num_kv_heads=4,
  mlp_width=5504,
  dtype="bfloat16",
  scan_layers=False,
)
BLOCKS = 8
# What the compiler estimates for the smallest fusions on all three chips, which
# is 1817 cycles on v5e and 2116 on the others.
START_SECONDS = 1.21e-6


def main() -> None:
  parser = command_line.Parser("python -m experiments.decode_cost.tpu", __doc__)
  parser.add_argument("step", choices=("decode", "prefill"))
  parser.add_argument("--chips", default=",".join(TOPOLOGY))
  parser.add_argument("--schemes", default=",".join(SCHEMES))
  parser.add_argument("--batches", default="1,8,64", help="rows to decode")
  parser.add_argument(
    "--contexts", default="1024,32768", help="tokens of a cache, or a prompt"
  )
  parser.add_argument("--out", default=str(TABLE), help="the table")
  options = parser.parse_args()
  split = lambda text: text.split(",")
  batches = split(options.batches) if options.step == "decode" else ["1"]
  cases = itertools.product(
    split(options.chips), batches, split(options.contexts),
    split(options.schemes),
  )  # fmt: skip
  for chip, batch, context, scheme in cases:
    config_lib.choose("chips", chip, TOPOLOGY)
    start = time.perf_counter()
    row = dict(zip(KEYS, (options.step, chip, batch, context, scheme)))
    row |= measure(options.step, chip, int(batch), int(context), scheme)
    facts = environment.facts()
    row |= {name: facts[name] for name in ("jax", "python", "commit")}
    csv_rows.put(options.out, row, KEYS)
    print(f"{time.perf_counter() - start:.0f} s:", row, flush=True)


def measure(
  step: str, chip: str, batch: int, context: int, scheme: str
) -> dict[str, Any]:
  """The columns of a row; empty ones if it does not fit."""
  residual = config_lib.ResidualConfig(scheme, num_blocks=BLOCKS)
  config = dataclasses.replace(CONFIG, residual=residual)
  devices = topology.devices(TOPOLOGY[chip])
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=1), devices)
  model = jax.eval_shape(lambda: models.build_model(config))
  if step == "decode":
    traced = programs.trace_next(model, mesh, batch, context)
  else:
    traced = programs.trace_extend(model, mesh, context, 0, context)
  least = _least_bytes(model, step, batch, context)
  try:
    compiled = traced.lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return {"fits": False, "least_MB": f"{least / 1e6:.1f}"}
  memory = compiled.memory_analysis()
  assert memory is not None
  peak = memory.argument_size_in_bytes + memory.output_size_in_bytes
  peak += memory.temp_size_in_bytes - memory.alias_size_in_bytes
  program = hlo.Program(compiled.as_text())
  total, depth = costs(program, topology.chip(devices[0]))
  return {
    "fits": True,
    "least_MB": f"{least / 1e6:.1f}",
    "MB": f"{total.nbytes / 1e6:.2f}",
    "estimate_us": f"{total.seconds * 1e6:.1f}",
    "depth_MB": f"{depth.nbytes / 1e6:.2f}",
    "depth_us": f"{depth.seconds * 1e6:.1f}",
    "depth_kernels": depth.kernels,
    "instructions": total.instructions,
    "peak_GiB": f"{peak / 2**30:.2f}",
  }


@dataclasses.dataclass
class Cost:
  """Of a step, or of a part of it."""

  nbytes: float = 0.0
  seconds: float = 0.0
  kernels: int = 0
  instructions: int = 0


def costs(program: hlo.Program, chip: chips.Chip) -> tuple[Cost, Cost]:
  """The cost of all instructions, and of those of depth attention."""
  total, depth = Cost(), Cost()
  owners = attribution.owners(program)
  for count, instruction, nbytes in program.instructions():
    seconds, kernels = 0.0, 0
    cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    if cycles:
      seconds = int(cycles[1]) / chip.clock_hz
    elif "tpu_custom_call" in instruction.attributes:
      kernels = 1
      seconds = START_SECONDS
      seconds += _operand_bytes(program, instruction) / (
        chip.hbm_bytes_per_second
      )
    parts = [total]
    if owners[instruction.place] == scopes.RESIDUAL:
      parts.append(depth)
    for part in parts:
      part.nbytes += count * nbytes
      part.seconds += count * seconds
      part.kernels += int(count * kernels)
      part.instructions += round(count)
  return total, depth


def _operand_bytes(program: hlo.Program, instruction: hlo.Instruction) -> float:
  """Of all operands and results, wherever they are."""
  known = program.computations[instruction.place[0]]
  arrays = list(instruction.arrays)
  for name in instruction.operands:
    arrays += known[name].arrays if name in known else ()
  return sum(array.nbytes for array in arrays)


def _least_bytes(model: Any, step: str, batch: int, context: int) -> float:
  """Weights once, and the cache: read while decoding, written in a prefill."""
  itemsize, config = 2, model.config
  weights = sum(
    leaf.size * (itemsize if leaf.ndim > 1 else 4)
    for leaf in jax.tree.leaves((model.sublayers, model.embedding.head))
  )
  entries = 2 * config.num_layers * config.kv_heads * config.head_size
  del step
  return weights + itemsize * entries * batch * context


if __name__ == "__main__":
  sys.exit(command_line.run(main))
