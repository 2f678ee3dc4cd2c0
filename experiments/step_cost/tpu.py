# SPDX-License-Identifier: Apache-2.0
"""Whole stacks compiled for TPU: the cost of Block AttnRes over PreNorm.

Forward and backward, compiled ahead of time with libtpu. Two kinds of stack:

  identity   sublayers that return their input, so that only the residual
             scheme and the pre-norms cost anything: the least favourable ratio
  training   a transformer of `attnres_jax` and the gradient of its loss; an arm
             may be any residual scheme, with options of it or its reads:
             "block_attnres heads=16", "mhc stream_dtype=bfloat16"

Layers are unrolled. Bytes are what the instructions of the compiled program
read from and write to memory. An update in place counts its new part only, and
weights of a layer that are cut out of a stack count that layer only. The body
of the only loop, over tiles of the loss, counts as often as it runs. The
estimate is the compiler's cycles for its own instructions. It has no cycles for
the Pallas kernels, which count their bytes over the bandwidth (kernels/README
says how accurate that is). Peak is the memory that the compiler allocates. Rows
are added to the table, so that it can be built in pieces:

  python -m experiments.step_cost.tpu identity
  python -m experiments.step_cost.tpu training

With the kernels, a stack of identity sublayers takes half a minute of one core
to compile. A training step takes 4 to 20 minutes per arm and chip, nearly all
of it for the machine code of single fusions. `--bytes_only` stops the compiler
before that: the bytes are the same, estimate and peak stay empty, and a
training step takes 20 seconds.
"""

import glob
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from attnres_jax.common import command_line
from attnres_jax.common import csv_rows
from attnres_jax.common import environment
from attnres_jax.plan import hlo
from attnres_jax.plan import topology
from experiments.step_cost import programs

_TABLE = pathlib.Path(__file__).with_suffix(".csv")
_KEYS = ("stack", "chip", "arm", "sublayers", "block", "tokens", "width")
# Ratio to PreNorm -> of what.
_RATIOS = {
  "bytes_ratio": "bytes_GB",
  "estimate_ratio": "estimate_ms",
  "peak_ratio": "peak_GiB",
}
_ORIGIN = ("jax", "libtpu", "commit")
_TOPOLOGY = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
_ARMS = {
  "identity": ("prenorm", "block, plain JAX", "block, kernels"),
  "training": ("prenorm", "block, kernels"),
}


def main() -> None:
  parser = command_line.Parser("python -m experiments.step_cost.tpu", __doc__)
  parser.add_argument("stack", choices=tuple(_ARMS))
  parser.add_argument("--chips", default="v6e,v5p")
  parser.add_argument(
    "--arms", default="", help="names separated by ';', all by default"
  )
  parser.add_argument("--sublayers", type=int, default=32)
  parser.add_argument("--block", type=int, default=0, help="0: 8 blocks")
  parser.add_argument("--batch", type=int, default=4)
  parser.add_argument("--tokens", type=int, default=4096)
  parser.add_argument("--width", type=int, default=2048)
  parser.add_argument("--vocabulary", type=int, default=32768)
  parser.add_argument("--bytes_only", action="store_true")
  parser.add_argument("--out", default=str(_TABLE), help="the table")
  options = parser.parse_args()
  options.block = options.block or max(1, options.sublayers // 8)
  arms = options.arms.split(";") if options.arms else _ARMS[options.stack]
  for chip in options.chips.split(","):
    for arm in arms:
      row = dict(zip(_KEYS, (options.stack, chip, arm)))
      row["sublayers"] = str(options.sublayers)
      row["block"] = str(options.block)
      row["tokens"] = str(options.batch * options.tokens)
      row["width"] = str(options.width)
      row |= (count if options.bytes_only else measure)(arm, chip, options)
      row |= environment.compiled()
      print(row, flush=True)
      add_row(options.out, row)


def measure(arm, chip, options) -> dict[str, str]:
  """The figures of the whole compiled program, without ratios."""
  (device, *_) = topology.devices(_TOPOLOGY[chip])
  compiled = _lowered(arm, device, options).compile()
  about = topology.chip(device)
  total, seconds = traffic(
    compiled.as_text(), about.clock_hz, about.hbm_bytes_per_second
  )
  memory = compiled.memory_analysis()
  assert memory is not None
  peak = memory.argument_size_in_bytes + memory.output_size_in_bytes
  peak += memory.temp_size_in_bytes - memory.alias_size_in_bytes
  return {
    "bytes_GB": f"{total / 1e9:.2f}",
    "estimate_ms": f"{seconds * 1e3:.2f}",
    "peak_GiB": f"{peak / 2**30:.2f}",
  }


def count(arm, chip, options) -> dict[str, str]:
  """The bytes alone, of the program before machine code is generated."""
  with tempfile.TemporaryDirectory() as folder:
    # libtpu reads its flags once, when it is loaded, and stays loaded until its
    # process ends.
    os.environ["LIBTPU_INIT_ARGS"] = (
      f"--xla_jf_dump_to={folder} --xla_jf_dump_hlo_text=true"
    )
    spawn = multiprocessing.get_context("spawn")
    compiler = spawn.Process(target=measure, args=(arm, chip, options))
    compiler.start()
    text, ended = "", False
    # Once the file is complete, its last line closes the program.
    while "\nENTRY " not in text or not text.endswith("}\n\n"):
      if ended:
        raise RuntimeError(f"the compiler ended with {compiler.exitcode}")
      time.sleep(0.2)
      ended = not compiler.is_alive()
      for path in glob.glob(f"{folder}/*TLP-hlo.txt"):
        text = pathlib.Path(path).read_text()
    compiler.kill()
    compiler.join()
  total = hlo.Program(text).hbm_bytes()
  return {"bytes_GB": f"{total / 1e9:.2f}", "estimate_ms": "", "peak_GiB": ""}


def _lowered(arm, device, options):
  sharding = jax.sharding.SingleDeviceSharding(device)
  build = getattr(programs, options.stack)
  step, arguments = build(arm, options)
  arguments = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
    arguments,
  )
  return jax.jit(step).lower(*arguments)


def traffic(text, clock, bandwidth) -> tuple[float, float]:
  """Bytes moved through memory, and the estimate of the module docstring."""
  program = hlo.Program(text)
  total, seconds = program.hbm_bytes(), 0.0
  for count, instruction, nbytes in program.instructions():
    cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    if cycles:
      seconds += count * int(cycles[1]) / clock
    elif "tpu_custom_call" in instruction.attributes:
      seconds += count * nbytes / bandwidth
  return total, seconds


def add_row(path, row) -> None:
  """Rewrites the table with the new row and all ratios to PreNorm."""
  csv_rows.put(path, row, _KEYS)
  rows = csv_rows.read(path)
  key = lambda row: tuple(row[k] for k in _KEYS if k != "arm")
  base = {key(r): r for r in rows if r["arm"] == "prenorm"}

  def with_ratios(row):
    """The columns, with each ratio to the right of its value."""
    prenorm = base.get(key(row))
    cells = {name: row[name] for name in _KEYS}
    for ratio, field in _RATIOS.items():
      cells[field], cells[ratio] = row[field], ""
      if prenorm is not None and row[field] and prenorm[field]:
        cells[ratio] = f"{float(row[field]) / float(prenorm[field]):.3f}"
    return cells | {name: row.get(name, "") for name in _ORIGIN}

  csv_rows.write(path, map(with_ratios, rows))


if __name__ == "__main__":
  sys.exit(command_line.run(main))
