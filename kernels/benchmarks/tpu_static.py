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

About 8 s per kernel, shape and chip; `--chips v6e --shapes 48b` selects a part.
Rows are put into the table one by one. Rows that the same commit, jax and
libtpu have made before are kept, so rerun a stopped command to resume.
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

from attnres_jax.common import chips
from attnres_jax.common import csv_rows
from attnres_jax.common import environment
from attnres_jax.plan import topology as topology_lib
from attnres_kernels import dispatch
from attnres_kernels.depth_attention import pallas_tpu as attention
from attnres_kernels.depth_attention import shapes
from attnres_kernels.depth_merge import pallas_tpu as merge
from attnres_kernels.kda import pallas_tpu as kda
from attnres_kernels.kda import shapes as kda_shapes
from attnres_kernels.rms_norm import pallas_tpu as rms_norm
from attnres_kernels.short_conv import pallas_tpu as short_conv
from attnres_kernels.stream_mix import pallas_tpu as stream_mix
from attnres_kernels.stream_mix import shapes as stream_shapes


class Chip(NamedTuple):
  topology: str
  version: str
  kind: str

  @property
  def mesh(self):
    return jax.sharding.Mesh(topology_lib.devices(self.topology)[:1], ("chip",))

  @property
  def place(self):
    return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())

  @property
  def info(self):
    return pltpu.get_tpu_info_for_chip(pltpu.ChipVersion[self.version], 1)

  @property
  def clock_hz(self) -> float:
    return chips.CHIPS[self.kind].clock_hz


CHIPS = {
  "v6e": Chip("v6e:2x2", "TPU_V6E", "TPU v6 lite"),
  "v5p": Chip("v5p:2x2x1", "TPU_V5P", "TPU v5"),
  "v5e": Chip("v5e:2x2", "TPU_V5E", "TPU v5 lite"),
  "tpu7x": Chip("tpu7x:2x2x1", "TPU_7X", "TPU7x"),
  "v4": Chip("v4:2x2x1", "TPU_V4", "TPU v4"),
}
_KEYS = ("kernel", "chip", "shape")
# From a shape to a function, its abstract arguments and its plan.
Build = Callable[[Any], tuple[Any, Any, dict[str, Any]]]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--op", default="depth", choices=tuple(_CASES))
  parser.add_argument("--chips", default=",".join(CHIPS))
  parser.add_argument("--shapes", default="", help="names, all by default")
  parser.add_argument("--kernels", default="", help="names, all by default")
  parser.add_argument("--all", action="store_true", help="every source count")
  parser.add_argument("--chunk", type=int, default=64, help="tokens, of KDA")
  parser.add_argument(
    "--heads", type=int, default=0, help="of KDA, most per step"
  )
  parser.add_argument("--out", default="")
  options = parser.parse_args()
  restart_with_dumps()
  cases = _CASES[options.op](options)
  chosen = lambda name, given: not given or name in given.split(",")
  cases = [
    (kernel, shape, build)
    for kernel, shape, build in cases
    if chosen(kernel, options.kernels) and chosen(shape.name, options.shapes)
  ]
  work = list(itertools.product(options.chips.split(","), cases))
  done = _done(options.out)
  for count, (chip, (kernel, shape, build)) in enumerate(work, 1):
    if (kernel, chip, str(shape)) in done:
      continue
    row = measure(kernel, shape, chip, build)
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


def measure(kernel: str, shape: Any, chip: str, build: Build):
  """One row of the table: a kernel by the name of its `pallas_call`."""
  place, info = CHIPS[chip].place, CHIPS[chip].info
  # Tiles depend on the chip.
  ambient = jax.sharding.use_abstract_mesh(CHIPS[chip].mesh.abstract_mesh)
  with ambient:
    function, arguments, plan = build(shape)
  arguments = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    arguments,
  )
  # In a program this small, the compiler would otherwise keep results on the
  # core, which is another kernel than one that writes them to memory.
  all_reserved = mock.patch.object(
    dispatch, "tpu_vmem_limit", lambda _: dispatch.tpu_vmem_bytes()
  )
  remove_dumps()
  with ambient, all_reserved, warnings.catch_warnings():
    warnings.simplefilter("ignore")
    jax.jit(function).lower(*arguments).compile()
  bundles, limits = schedule_of(kernel)
  schedule = bundles * plan["steps"] / CHIPS[chip].clock_hz
  memory = plan["actual"] / info.mem_bw_bytes_per_second
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
    **limits,
    **environment.compiled(),
  }


def remove_dumps() -> None:
  for path in glob.glob(f"{os.environ['ATTNRES_DUMP']}/*"):
    os.remove(path)


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


def _attention(shape, backward):
  token = (shape.tokens, shape.width)
  sources = [jax.ShapeDtypeStruct(token, jnp.bfloat16)] * shape.sources
  key_width = shape.rank or shape.width
  query = jax.ShapeDtypeStruct((shape.queries, key_width), jnp.float32)
  of_heads = (shape.heads,) if shape.heads > 1 else ()
  lse = jax.ShapeDtypeStruct(
    (shape.queries, shape.tokens, *of_heads), jnp.float32
  )
  slabs = (1 + backward) * shape.sources + shape.queries
  tile = attention.BlockSizes.choose(
    shape.tokens, shape.width, 2 * slabs * shape.width, shape.heads
  ).tokens
  tiles = math.ceil(shape.tokens / tile)
  parts = max(p for p in range(1, 9) if tiles % p == 0)
  # Backward, two sets of query terms once, and their gradient once per part.
  fixed = 12 + 8 * parts if backward else 6
  plan = _plan(
    shape.tokens,
    tile,
    shape.width,
    slabs,
    stats=(4 + 4 * backward) * shape.queries * shape.heads,
    fixed=fixed * shape.queries * shape.width,
  )
  options = dict(shape.options, eps=1e-6)
  if not backward:
    forward = lambda q, *s: attention.forward(q, s, **options)
    return forward, (query, *sources), plan
  douts = [jax.ShapeDtypeStruct(token, jnp.bfloat16)] * shape.queries
  backward_of = lambda q, l, o, *s: attention.backward(
    q, s, l, tuple(o), l, **options
  )
  return backward_of, (query, lse, douts, *sources), plan


def _merge(shape, backward):
  wide = jax.ShapeDtypeStruct((shape.tokens, shape.width), jnp.bfloat16)
  row = jax.ShapeDtypeStruct((shape.width,), jnp.float32)
  query = jax.ShapeDtypeStruct((shape.rank or shape.width,), jnp.float32)
  of_heads = (shape.heads,) if shape.heads > 1 else ()
  lse = jax.ShapeDtypeStruct((shape.tokens, *of_heads), jnp.float32)
  slabs = 5 if backward else 3
  tile = merge.choose_tile(shape.tokens, 2 * slabs * shape.width)
  plan = _plan(
    shape.tokens,
    tile,
    shape.width,
    slabs=slabs,
    stats=(4 + 4 * backward) * shape.heads,
    fixed=(8 + 64 * 8 * backward) * shape.width,
  )
  kernel = merge.backward if backward else merge.forward
  rest = (row, wide) if backward else (row,)
  function = lambda *a: kernel(*a, eps=1e-6, norm_eps=1e-6, **shape.options)
  return function, (wide, lse, query, wide, *rest), plan


def _norm(shape, backward):
  wide = jax.ShapeDtypeStruct((shape.tokens, shape.width), jnp.bfloat16)
  row = jax.ShapeDtypeStruct((shape.width,), jnp.float32)
  slabs = 2 + backward
  plan = _plan(
    shape.tokens,
    merge.choose_tile(shape.tokens, 2 * slabs * shape.width),
    shape.width,
    slabs=slabs,
    stats=0,
    fixed=(4 + 32 * 8 * backward) * shape.width,
  )
  kernel = rms_norm.backward if backward else rms_norm.forward
  arguments = (wide, row, wide)[: 2 + backward]
  return functools.partial(kernel, eps=1e-6), arguments, plan


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


def _depth_cases(options) -> Iterator[tuple[str, Any, Build]]:
  listed = shapes.NAMED if options.all else shapes.TABLE
  for op, build, of_op in (
    (
      "depth_attention",
      _attention,
      (*listed, *shapes.HEADS, *shapes.PEER, *shapes.STEP),
    ),
    (
      "depth_merge",
      _merge,
      (*shapes.MERGE, *shapes.MERGE_HEADS, *shapes.MERGE_PEER),
    ),
    ("rms_norm", _norm, shapes.MERGE),
  ):
    for backward, direction in enumerate(("forward", "backward")):
      for shape in of_op:
        build_one = functools.partial(build, backward=bool(backward))
        yield f"{op}_{direction}", shape, build_one


# Operands and results that a kernel moves: in the input dtype with width K or
# V, in float32 with width K, per token, and matrices per chunk.
_OPERANDS = {
  "kda_forward": dict(low=4, wide=1, rows=1, states=0, squares=0),
  "kda_forward_saving": dict(low=5, wide=1, rows=1, states=1, squares=3),
  "kda_backward": dict(low=7, wide=2, rows=2, states=1, squares=3),
}


def _kda_cases(options) -> Iterator[tuple[str, Any, Build]]:
  for kernel in _OPERANDS:
    for shape in kda_shapes.NAMED:
      build = lambda shape, kernel=kernel: _kda(
        kernel, shape, options.chunk, options.heads
      )
      yield kernel, shape, build
  for backward, direction in enumerate(("forward", "backward")):
    for shape in kda_shapes.NAMED:
      build = functools.partial(_conv, backward=bool(backward))
      yield f"short_conv_{direction}", shape, build


_TAPS, _UNIT_EPS = 4, 1e-6


def _conv(shape, backward):
  """The features of queries or keys: heads of length one, no documents."""
  struct = jax.ShapeDtypeStruct
  x = struct((shape.batch, shape.tokens, shape.heads, shape.key), jnp.bfloat16)
  taps = struct((_TAPS, shape.heads, shape.key), jnp.float32)
  call = short_conv.Call(x, taps, _UNIT_EPS)
  kernel = short_conv.backward if backward else short_conv.forward
  function = lambda x, taps, *dy: kernel(
    x, taps, None, None, *dy, unit_eps=_UNIT_EPS
  )
  steps = math.prod(call.grid)
  # Queries or keys, their features, and backward a gradient; before them, the
  # last rows of the tile before.
  arrays = 2 * (2 + backward) * x.size
  before = 2 * steps * short_conv.BEFORE * shape.key
  of_taps = 4 * _TAPS * shape.heads * shape.key
  plan = {
    "tile": call.size,
    "steps": steps,
    "minimum": arrays + (1 + backward) * of_taps,
    "actual": arrays + before + (1 + 8 * shape.batch * backward) * of_taps,
    "vmem": 4 * (2 + backward) * call.size * shape.key,
  }
  return function, (x, taps) + (x,) * backward, plan


def _kda(kernel, shape, chunk, most):
  token = shape.batch, shape.tokens, shape.heads
  struct = jax.ShapeDtypeStruct
  key = struct((*token, shape.key), jnp.bfloat16)
  value = struct((*token, shape.value), jnp.bfloat16)
  decay = struct(key.shape, jnp.float32)
  beta = struct(token, jnp.float32)
  state = struct(
    (shape.batch, shape.heads, shape.key, shape.value), jnp.float32
  )
  backward = kernel == "kda_backward"
  step = kda.Step.choose(
    shape.batch, shape.heads, chunk, shape.key, backward=backward, most=most
  )
  options = dict(scale=1.0, chunk_size=chunk, most=most)
  arguments = key, key, value, decay, beta, state
  forward = functools.partial(
    kda.forward, **options, chunks=kernel != "kda_forward"
  )
  if backward:
    *_, chunks = jax.eval_shape(forward, *arguments)
    forward = functools.partial(kda.backward, **options)
    arguments = key, key, decay, beta, chunks, value, state
  return forward, arguments, _kda_plan(shape, chunk, step, **_OPERANDS[kernel])


def _kda_plan(shape, chunk, step, low, wide, rows, states, squares):
  """Bytes per chunk and head, times chunks and heads; states enter once."""
  assert shape.key == shape.value
  tile = chunk * shape.key
  # Rows of tokens and squares lie side by side for some heads. They fill whole
  # tiles of 8 sublanes and 128 lanes in memory.
  lanes = max(chunk * step.aside, 128) / step.aside
  square = shape.key * shape.value
  matrices = 2 * (states * square + squares * chunk * lanes)
  each = (2 * low + 4 * wide) * tile + 4 * 8 * rows * lanes + matrices
  all_heads = shape.batch * shape.heads
  heads = step.rows * step.heads
  steps = all_heads // heads * (shape.tokens // chunk)
  ends = 8 * all_heads * square
  tokens = all_heads * shape.tokens
  minimum = tokens * ((2 * low + 4 * wide) * shape.key + 4 * rows) + ends
  return {
    "tile": chunk,
    "steps": steps,
    "minimum": minimum,
    "actual": steps * heads * each + ends,
    "vmem": heads * (2 * each + 4 * square),
  }


def _stream_cases(options) -> Iterator[tuple[str, Any, Build]]:
  del options
  for backward, direction in enumerate(("forward", "backward")):
    for shape in stream_shapes.NAMED:
      build = functools.partial(_streams, backward=bool(backward))
      yield f"stream_mix_{direction}", shape, build


def _streams(shape, backward):
  """The schedule includes zeros that only the first step of a core writes."""
  struct, wide = jax.ShapeDtypeStruct, jnp.float32
  count, tokens, columns = shape.count, shape.tokens, shape.columns
  streams = (struct((tokens, shape.width), shape.dtype),) * count
  y = struct((tokens, shape.width), jnp.bfloat16)
  logits = struct((columns, tokens), wide)
  arguments = (
    streams,
    y,
    struct((count, tokens), wide),
    struct((count, count, tokens), wide),
    struct((count, shape.width, columns), wide),
    struct((count,), wide),
    struct((), wide),
  )
  options = dict(eps=1e-6, dtype=jnp.dtype(jnp.bfloat16))
  if backward:
    inverse = struct((tokens,), wide)
    arguments += (streams, logits, inverse, streams, y, logits)
  function = stream_mix.backward if backward else stream_mix.forward
  call = stream_mix.Call(streams, y, arguments[4])
  moved = tokens * call.token_bytes(backward)
  plan = {
    "tile": call.tile,
    "steps": call.tiles,
    "minimum": moved,
    "actual": moved,
    "vmem": call.vmem_bytes(backward),
  }
  return functools.partial(function, **options), arguments, plan


_CASES = {"depth": _depth_cases, "kda": _kda_cases, "streams": _stream_cases}


if __name__ == "__main__":
  main()
