# SPDX-License-Identifier: Apache-2.0
"""Static roofline of the TPU kernels: schedule time against memory time.

Needs libtpu but no TPU: every kernel is compiled ahead of time for each chip,
and the compiler writes its final VLIW schedule. Schedule time is what the core
needs if it never waits: bundles per grid step times steps, over the clock.
Memory time is the bytes that the blocks move, over HBM bandwidth. A kernel
whose ratio (first over second) is below 1 is bound by memory. Both are per
core; a v5p or tpu7x chip has two.

  export PYTHONPATH=kernels
  python kernels/benchmarks/tpu_static.py --out tpu_static.csv

About 8 s per kernel, shape and chip; `--chips v6e --shapes 48b` selects a part.
"""

import argparse
import csv
import glob
import math
import os
import re
import sys
import tempfile
import warnings

_CLOCK_HZ = {"v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "tpu7x": 2.2e9}
_TOPOLOGY = {
  "v5e": "v5e:2x2",
  "v5p": "v5p:2x2x1",
  "v6e": "v6e:2x2",
  "tpu7x": "tpu7x:2x2x1",
}
_VERSION = {
  "v5e": "TPU_V5E",
  "v5p": "TPU_V5P",
  "v6e": "TPU_V6E",
  "tpu7x": "TPU_7X",
}
FIELDS = (
  "kernel",
  "chip",
  "shape",
  "tile",
  "steps",
  "min_MB",
  "actual_MB",
  "schedule_us",
  "hbm_us",
  "ratio",
  "vmem_MiB",
  "limiting_slot",
  "slot_use",
)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--chips", default="v6e,v5p,v5e,tpu7x")
  parser.add_argument("--shapes", default="", help="comma-separated names")
  parser.add_argument("--kernels", default="", help="comma-separated names")
  parser.add_argument("--all", action="store_true", help="every source count")
  parser.add_argument("--out", default="")
  options = parser.parse_args()
  restart_with_dumps()
  rows = []
  for chip in options.chips.split(","):
    for kernel, shape in _cases(options):
      row = measure(kernel, shape, chip)
      rows.append(row)
      print(" ".join(f"{row[field]}" for field in FIELDS), flush=True)
      if options.out:
        write(options.out, rows)


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
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "true"
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.exit(os.spawnv(os.P_WAIT, sys.executable, [sys.executable, *sys.argv]))


def measure(kernel, shape, chip, build=None):
  """One row of the table.

  Args:
    kernel: the name of the `pallas_call`.
    shape: printed, and passed to `build`.
    chip: v5e, v5p, v6e or tpu7x.
    build: maps a shape to a function, its abstract arguments and its plan; by
      default that of the kernel's name.
  """
  import jax
  from jax.experimental import topologies
  from jax.experimental.pallas import tpu as pltpu

  topology = topologies.get_topology_desc(
    platform="tpu", topology_name=_TOPOLOGY[chip]
  )
  sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
  function, arguments, plan = (build or _KERNELS[kernel])(shape)
  arguments = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
    arguments,
  )
  folder = os.environ["ATTNRES_DUMP"]
  for path in glob.glob(f"{folder}/*"):
    os.remove(path)
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    jax.jit(function).lower(*arguments).compile()
  bundles, slots = _schedule(folder, kernel)
  info = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion[_VERSION[chip]], 1)
  schedule = bundles * plan["steps"] / _CLOCK_HZ[chip]
  memory = plan["actual"] / info.mem_bw_bytes_per_second
  slot = max(slots, key=lambda name: slots[name])
  return {
    "kernel": kernel,
    "chip": chip,
    "shape": str(shape),
    "tile": plan["tile"],
    "steps": plan["steps"],
    "min_MB": f"{plan['minimum'] / 1e6:.1f}",
    "actual_MB": f"{plan['actual'] / 1e6:.1f}",
    "schedule_us": f"{schedule * 1e6:.1f}",
    "hbm_us": f"{memory * 1e6:.1f}",
    "ratio": f"{schedule / memory:.2f}",
    "vmem_MiB": f"{plan['vmem'] / 2**20:.1f}",
    "limiting_slot": slot,
    "slot_use": f"{slots[slot] / bundles:.2f}",
  }


def _schedule(folder, kernel):
  """Bundles of one grid step, and how many each slot needs if always full."""
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
  return bundles, {n: u / c for n, u, c in zip(names, used, capacity)}


def _attention_forward(shape):
  jax, jnp, kernel = _modules("depth_attention")
  query, sources, _, _ = _attention_arrays(jax, jnp, shape)
  slabs = shape.sources + shape.queries
  tile = kernel.BlockSizes.choose(
    shape.tokens, shape.width, 2 * slabs * shape.width
  ).tokens
  plan = _plan(
    shape.tokens,
    tile,
    shape.width,
    slabs,
    stats=4 * shape.queries,
    fixed=6 * shape.queries * shape.width,
  )
  return (
    lambda q, *s: kernel.forward(q, s, None, eps=1e-6),
    (query, *sources),
    plan,
  )


def _attention_backward(shape):
  jax, jnp, kernel = _modules("depth_attention")
  query, sources, lse, dout = _attention_arrays(jax, jnp, shape)
  slabs = 2 * shape.sources + shape.queries
  tile = kernel.BlockSizes.choose(
    shape.tokens, shape.width, 2 * slabs * shape.width
  ).tokens
  tiles = math.ceil(shape.tokens / tile)
  parts = max(p for p in range(1, 9) if tiles % p == 0)
  plan = _plan(
    shape.tokens,
    tile,
    shape.width,
    slabs,
    stats=8 * shape.queries,
    # Two sets of query terms once, and their float32 gradient once per part.
    fixed=(12 + 8 * parts) * shape.queries * shape.width,
  )
  return (
    lambda q, l, o, d, *s: kernel.backward(q, s, None, l, o, d, eps=1e-6),
    (query, lse, dout, lse, *sources),
    plan,
  )


def _attention_arrays(jax, jnp, shape):
  token = (shape.tokens, shape.width)
  sources = [
    jax.ShapeDtypeStruct(token, jnp.bfloat16) for _ in range(shape.sources)
  ]
  query = jax.ShapeDtypeStruct((shape.queries, shape.width), jnp.float32)
  lse = jax.ShapeDtypeStruct((shape.queries, shape.tokens), jnp.float32)
  dout = jax.ShapeDtypeStruct((shape.queries, *token), jnp.bfloat16)
  return query, sources, lse, dout


def _merge_forward(shape):
  jax, jnp, kernel = _modules("depth_merge")
  wide = jax.ShapeDtypeStruct((shape.tokens, shape.width), jnp.bfloat16)
  row = jax.ShapeDtypeStruct((shape.width,), jnp.float32)
  lse = jax.ShapeDtypeStruct((shape.tokens,), jnp.float32)
  tile = kernel.choose_tile(shape.tokens, 10 * shape.width)
  plan = _plan(
    shape.tokens, tile, shape.width, 5, stats=4, fixed=8 * shape.width
  )
  return (
    lambda *a: kernel.forward(*a, eps=1e-6, norm_eps=1e-6),
    (wide, lse, row, wide, wide, row),
    plan,
  )


def _merge_backward(shape):
  jax, jnp, kernel = _modules("depth_merge")
  wide = jax.ShapeDtypeStruct((shape.tokens, shape.width), jnp.bfloat16)
  row = jax.ShapeDtypeStruct((shape.width,), jnp.float32)
  lse = jax.ShapeDtypeStruct((shape.tokens,), jnp.float32)
  tile = kernel.choose_tile(shape.tokens, 12 * shape.width)
  plan = _plan(
    shape.tokens,
    tile,
    shape.width,
    6,
    stats=8,
    fixed=(8 + 64 * 8) * shape.width,
  )
  return (
    lambda *a: kernel.backward(*a, eps=1e-6, norm_eps=1e-6),
    (wide, lse, row, wide, row, wide, wide),
    plan,
  )


_KERNELS = {
  "depth_attention_forward": _attention_forward,
  "depth_attention_backward": _attention_backward,
  "depth_merge_forward": _merge_forward,
  "depth_merge_backward": _merge_backward,
}


def _plan(tokens, tile, width, slabs, stats, fixed):
  """Bytes moved and VMEM used; in memory, rows are padded to 128 lanes."""
  steps = math.ceil(tokens / tile)
  lanes = 128 * math.ceil(width / 128)
  return {
    "tile": tile,
    "steps": steps,
    "minimum": 2 * slabs * tokens * width + stats * tokens + fixed,
    "actual": 2 * slabs * steps * tile * lanes + stats * steps * tile + fixed,
    "vmem": 2 * (2 * slabs * tile * lanes + stats * tile) + fixed,
  }


def _modules(op):
  import importlib

  import jax
  import jax.numpy as jnp

  return jax, jnp, importlib.import_module(f"attnres_kernels.{op}.pallas_tpu")


def _cases(options):
  from attnres_kernels.depth_attention import shapes

  cases = []
  for kernel in ("depth_attention_forward", "depth_attention_backward"):
    listed = shapes.NAMED if options.all else shapes.TABLE
    cases += [(kernel, shape) for shape in listed]
  for kernel in ("depth_merge_forward", "depth_merge_backward"):
    cases += [(kernel, shape) for shape in shapes.MERGE]
  names = options.shapes.split(",") if options.shapes else None
  kernels = options.kernels.split(",") if options.kernels else list(_KERNELS)
  return [
    (kernel, shape)
    for kernel, shape in cases
    if kernel in kernels and (names is None or shape.name in names)
  ]


def write(path, rows):
  with open(path, "w", newline="") as file:
    writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


if __name__ == "__main__":
  main()
