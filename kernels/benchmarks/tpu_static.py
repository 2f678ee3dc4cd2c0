# SPDX-License-Identifier: Apache-2.0
"""Static roofline of the TPU kernels: schedule time against memory time.

Needs libtpu but no TPU: every kernel is compiled ahead of time for each chip,
and the compiler writes its final VLIW schedule. Schedule time is what the core
needs if it never waits: bundles per grid step times steps, over the clock.
Memory time is the bytes that the blocks move, over HBM bandwidth. A kernel
whose ratio (first over second) is below 1 is bound by memory. Both are per
core; a v5p or tpu7x chip has two.

  export PYTHONPATH=.:kernels
  python kernels/benchmarks/tpu_static.py --out tpu_static.csv

About 10 s per shape and chip; `--chips v6e --shapes 48b` selects a part. Rows
are put into the table one by one. A stopped command keeps the rows that the
same commit, jax and libtpu have made.
"""

import argparse
from collections.abc import Callable, Iterator
import functools
import glob
import itertools
import math
import os
import re
import sys
import tempfile
from typing import Any, NamedTuple
from unittest import mock
import warnings

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from attnres_jax.common import chips
from attnres_jax.common import csv_rows
from attnres_jax.common import environment
from attnres_jax.common import topology as topology_lib
from attnres_kernels import platforms
from attnres_kernels import problems
from attnres_kernels.depth_attention import shapes
from attnres_kernels.kda import shapes as kda_shapes


class Chip(NamedTuple):
  """What is compiled for, by the names of three libraries."""

  topology: str
  version: str
  kind: str

  @property
  def mesh(self) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(topology_lib.devices(self.topology)[:1], ("chip",))


CHIPS = {
  "v6e": Chip("v6e:2x2", "TPU_V6E", "TPU v6 lite"),
  "v5p": Chip("v5p:2x2x1", "TPU_V5P", "TPU v5"),
  "v5e": Chip("v5e:2x2", "TPU_V5E", "TPU v5 lite"),
  "tpu7x": Chip("tpu7x:2x2x1", "TPU_7X", "TPU7x"),
  "v4": Chip("v4:2x2x1", "TPU_V4", "TPU v4"),
}
# Table -> operator -> shapes.
_SHAPES: dict[str, dict[str, tuple[Any, ...]]] = {
  "depth": {
    "depth_attention": (
      *shapes.TABLE, *shapes.HEADS, *shapes.PEER, *shapes.STEP,
    ),
    "depth_merge_norm": (
      *shapes.MERGE, *shapes.MERGE_HEADS, *shapes.MERGE_PEER,
    ),
    "rms_norm": shapes.MERGE,
  },
  "kda": {"kda": kda_shapes.NAMED, "short_conv": kda_shapes.NAMED},
}  # fmt: skip
_KEYS = ("kernel", "chip", "shape")
# A tile of an array in memory: sublanes and lanes.
_TILE = 8, 128


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--op", default="depth", choices=tuple(_SHAPES))
  parser.add_argument("--chips", default=",".join(CHIPS))
  parser.add_argument("--shapes", default="", help="names, all by default")
  parser.add_argument("--operators", default="", help="names, all by default")
  parser.add_argument("--out", default="")
  options = parser.parse_args()
  restart_with_dumps()
  chosen = lambda name, given: not given or name in given.split(",")
  cases = [
    (operator, shape)
    for operator, listed in _SHAPES[options.op].items()
    for shape in listed
    if chosen(operator, options.operators)
    and chosen(shape.name, options.shapes)
  ]
  work = list(itertools.product(options.chips.split(","), cases))
  done = _done(options.out)
  for count, (chip, (operator, shape)) in enumerate(work, 1):
    for row in measure(operator, shape, chip, done):
      print(f"[{count}/{len(work)}]", *row.values(), flush=True)
      if options.out:
        csv_rows.put(options.out, row, _KEYS)


def _done(path: str) -> set[tuple[str, ...]]:
  """Keys of the rows that this very code has made."""
  origin = environment.compiled()
  if not os.path.exists(path) or origin["commit"].endswith("+"):
    return set()
  return {
    tuple(row[name] for name in _KEYS)
    for row in csv_rows.read(path)
    if all(row.get(name) == value for name, value in origin.items())
  }


def restart_with_dumps() -> None:
  """Runs this program again, with a compiler that writes its schedules."""
  if "ATTNRES_DUMP" in os.environ:
    return
  # libtpu reads its flags once, when it is loaded.
  with tempfile.TemporaryDirectory() as folder:
    os.environ["ATTNRES_DUMP"] = folder
    os.environ["LIBTPU_INIT_ARGS"] = (
      f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    )
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.exit(os.spawnv(os.P_WAIT, sys.executable, [sys.executable, *sys.argv]))


def measure(
  operator: str, shape: Any, chip: str, done: set[tuple[str, ...]]
) -> Iterator[dict[str, str]]:
  """The rows of the kernels of an operator and its gradient that are missing.

  Args:
    operator: a key of `problems.OPERATORS`.
    shape: of the operator.
    chip: a key of `CHIPS`.
    done: keys of rows that are there.
  """
  mesh = CHIPS[chip].mesh
  built: list[problems.Problem] = []

  def arrays() -> Any:
    draw = lambda *sizes, dtype="float32": jnp.zeros(sizes, dtype)
    problem = problems.OPERATORS[operator].build(shape, jnp.bfloat16, draw)
    built.append(problem)
    return problems.arguments(problem, draw)

  place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  arguments = [
    jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    for x in jax.eval_shape(arrays)
  ]
  # In a program this small, the compiler would otherwise keep results on the
  # core, which is another kernel than one that writes them to memory.
  all_reserved = mock.patch.object(
    platforms, "tpu_vmem_limit", lambda _: platforms.tpu_vmem_bytes()
  )
  # Tiles depend on the chip.
  ambient = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
  with ambient, all_reserved, warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for given in (arguments, arguments[: len(built[0].arrays)]):
      run = functools.partial(problems.results, built[0], "pallas_tpu")
      program = jax.jit(run).trace(*given)
      kernels = dict(_kernels(program.jaxpr.jaxpr))
      keys = {name: (name, chip, str(shape)) for name in kernels}
      missing = {name: key for name, key in keys.items() if key not in done}
      if missing:
        for path in glob.glob(f"{os.environ['ATTNRES_DUMP']}/*"):
          os.remove(path)
        program.lower().compile()
      for name, key in missing.items():
        done.add(key)
        yield dict(zip(_KEYS, key)) | _row(name, kernels[name], chip)


def _kernels(jaxpr: Any) -> Iterator[tuple[str, Any]]:
  """The name and the grid mapping of every `pallas_call`, once per name."""
  for equation in jaxpr.eqns:
    if "grid_mapping" in equation.params:
      name = equation.params["name"]
      yield name, equation.params["grid_mapping"]
      continue
    for value in jax.tree.leaves(equation.params):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from _kernels(inner)


def _row(kernel: str, mapping: Any, chip: str) -> dict[str, str]:
  info = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion[CHIPS[chip].version], 1)
  steps = math.prod(mapping.grid)
  moved = sum(
    _moved_bytes(block, mapping.grid) for block in mapping.block_mappings
  )
  bundles, limits = schedule_of(kernel)
  schedule = bundles * steps / chips.CHIPS[CHIPS[chip].kind].clock_hz
  memory = moved / info.mem_bw_bytes_per_second
  return {
    "steps": str(steps),
    "actual_MB": f"{moved / 1e6:.1f}",
    "schedule_us": f"{schedule * 1e6:.1f}",
    "hbm_us": f"{memory * 1e6:.1f}",
    "ratio": f"{schedule / memory:.2f}",
    **limits,
    **environment.compiled(),
  }


def _moved_bytes(block: Any, grid: tuple[int, ...]) -> int:
  """Of the blocks of one operand; a block that stays is moved once."""
  run: Callable[..., Any] = jax.extend.core.jaxpr_as_fun(block.index_map_jaxpr)
  places = np.indices(grid, np.int32).reshape(len(grid), -1)
  at = np.stack([
    np.broadcast_to(x, places.shape[1:]) for x in jax.vmap(run)(*places)
  ])  # fmt: skip
  moves = 1 + np.count_nonzero(np.any(np.diff(at, axis=1), axis=0))
  array = block.array_aval
  sizes = [getattr(size, "block_size", size) for size in block.block_shape]
  sizes[-2:] = [
    -(-size // tile) * tile for size, tile in zip(sizes[-2:], _TILE)
  ]
  return moves * math.prod(sizes) * array.dtype.itemsize


def schedule_of(kernel: str) -> tuple[int, dict[str, str]]:
  """Bundles of one grid step, and the columns about the fullest slot."""
  folder = os.environ["ATTNRES_DUMP"]
  (path,) = glob.glob(f"{folder}/*{kernel}*schedule-analysis_final_bundles*")
  with open(path) as file:
    text = file.read()
  (total,) = re.findall(r"total scheduled bundles:\s+(\d+)", text)
  bundles = int(total)
  (path,) = glob.glob(f"{folder}/*{kernel}*final_hlo-static-per-bundle*")
  with open(path) as file:
    lines = file.read().splitlines()
  names = [name.strip() for name in lines[1].split(",")]
  capacity = [int(number) for number in lines[2].split()]
  used = [0] * len(names)
  for line in lines[4:]:
    if line[:1].isdigit():
      used = [a + int(b) for a, b in zip(used, line.split())]
  needed = {n: u / c for n, u, c in zip(names, used, capacity)}
  slot = max(needed, key=lambda name: needed[name])
  use = f"{needed[slot] / bundles:.2f}"
  return bundles, {"limiting_slot": slot, "slot_use": use}


if __name__ == "__main__":
  main()
