# SPDX-License-Identifier: Apache-2.0
"""Softmax attention on TPU: bytes and schedules, by the compiler.

No TPU is needed, only libtpu; see `tpu_static.py`. Two kinds of rows:

  step     forward and backward of one row of the batch, as the compiler counts
           it, every argument in the layout that suits it: bytes, the least that
           they could be (each array read or written once in each direction),
           temporary memory
  others   one kernel: bundles of a block, and the time of all blocks that the
           causal mask leaves, over the time of their products at the peak of
           the chip (`blocks_us`) and over that of the exact triangle
           (`peak_us`); bytes that blocks fetch, and the time of those

  export PYTHONPATH=.:kernels
  python kernels/benchmarks/flash_static.py --out flash_static.csv

About 20 s per shape and chip; `--block` and `--at_once` try other blocks,
`--kernel tiled` has the step without kernels.
"""

import argparse
import importlib.metadata
from typing import NamedTuple

from benchmarks import tpu_static
import jax
from jax.experimental import layout
import jax.numpy as jnp

from attnres_jax import csv_rows
from attnres_jax.models.mixers import causal_attention


class Shape(NamedTuple):
  name: str
  heads: int
  kv_heads: int
  tokens: int
  key: int
  value: int


SHAPES = (
  Shape("mla_48b", 32, 32, 4096, 192, 128),
  Shape("mla_table2", 16, 16, 8192, 192, 128),
  Shape("gqa", 16, 4, 4096, 128, 128),
)


class Kernel(NamedTuple):
  """Widths: of products per pair of tokens, of rows read or written once, and
  of rows that every block fetches.
  """

  products: str
  once: str
  per_block: str


_KERNELS = {
  "splash_mha_fwd": Kernel(
    "kv", "kvvv", "kv"
  ),  # Normalisers are as wide as 2v.
  "splash_mha_dkv": Kernel("kvvk", "kvkv", "kv"),
  "splash_mha_dq": Kernel("kvk", "kkv", "kv"),
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--chips", default=",".join(tpu_static.CHIPS))
  parser.add_argument("--shapes", default=",".join(s.name for s in SHAPES))
  parser.add_argument("--kernel", default="splash", choices=("splash", "tiled"))
  parser.add_argument("--block", type=int, default=0)
  parser.add_argument("--at_once", type=int, default=0)
  parser.add_argument("--out", default="")
  options = parser.parse_args()
  tpu_static.restart_with_dumps()
  if options.block:
    causal_attention._BLOCKS = (options.block,)
  if options.at_once:
    causal_attention._KEYS_AT_ONCE = options.at_once
  rows = []
  for chip in options.chips.split(","):
    for shape in SHAPES:
      if shape.name not in options.shapes.split(","):
        continue
      for row in _rows(chip, shape, options.kernel):
        rows.append(row)
        print(*row.values(), flush=True)
      if options.out:
        csv_rows.write(options.out, rows)


def _rows(chip, shape, kernel):
  tpu_static.remove_dumps()
  sizes = causal_attention.block_sizes(shape.tokens)
  common = {
    "chip": chip,
    "shape": shape.name,
    "heads": f"{shape.heads}/{shape.kv_heads}",
    "tokens": shape.tokens,
    "widths": f"{shape.key}/{shape.value}",
    "block": sizes.block_q if kernel == "splash" else causal_attention.TILE,
    "at_once": sizes.block_kv_compute if kernel == "splash" else "",
    "jax": jax.__version__,
    "libtpu": importlib.metadata.version("libtpu"),
  }
  yield {**common, "row": f"step, {kernel}", **_step(chip, shape, kernel)}
  if kernel == "splash":
    for name in _KERNELS:
      yield {**common, "row": name, **_kernel(chip, shape, name, sizes)}


def _step(chip, shape, kernel):
  token = (1, shape.tokens)
  arrays = [
    jax.ShapeDtypeStruct((*token, heads, width), jnp.bfloat16)
    for heads, width in (
      (shape.heads, shape.key),
      (shape.kv_heads, shape.key),
      (shape.kv_heads, shape.value),
      (shape.heads, shape.value),
    )
  ]

  def step(query, key, value, dmixed):
    attend = lambda *a: causal_attention.attend(*a, kernel=kernel)
    mixed, pull = jax.vjp(attend, query, key, value)
    return mixed, *pull(dmixed)

  suited = layout.Format(layout.Layout.AUTO, tpu_static.CHIPS[chip].place)
  compiled = (
    jax.jit(step, in_shardings=suited, out_shardings=suited)
    .lower(*arrays)
    .compile()
  )
  query, key, value, mixed = (x.size * x.dtype.itemsize for x in arrays)
  # Forward; backward reads all of it and dmixed, and writes three gradients.
  least = 3 * (query + key + value) + 3 * mixed
  moved = dict(compiled.cost_analysis() or {})["bytes accessed"]
  temporary = getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)
  return {
    "MB": f"{moved / 1e6:.1f}",
    "least_MB": f"{least / 1e6:.1f}",
    "MB_ratio": f"{moved / least:.2f}",
    "temp_MiB": f"{temporary / 2**20:.0f}",
  }


def _kernel(chip, shape, name, sizes):
  bundles, limits = tpu_static.schedule_of(name)
  kernel, block = _KERNELS[name], sizes.block_q
  on_a_side = -(-shape.tokens // block)
  blocks = shape.heads * on_a_side * (on_a_side + 1) // 2
  info = tpu_static.CHIPS[chip].info
  widths = {"k": shape.key, "v": shape.value}
  flops = 2 * sum(widths[w] for w in kernel.products)
  schedule = bundles * blocks / tpu_static.CHIPS[chip].clock_hz
  unit = blocks * block**2 * flops / info.bf16_ops_per_second
  peak = shape.heads * shape.tokens**2 / 2 * flops / info.bf16_ops_per_second
  # Rows in memory are whole lanes.
  lanes = lambda names: sum(2 * 128 * -(-widths[w] // 128) for w in names)
  rows = shape.heads * on_a_side * block
  fetched = rows * lanes(kernel.once) + blocks * block * lanes(kernel.per_block)
  return {
    "bundles": bundles,
    "blocks": blocks,
    "schedule_us": f"{schedule * 1e6:.0f}",
    "blocks_us": f"{unit * 1e6:.0f}",
    "blocks_ratio": f"{schedule / unit:.2f}",
    "peak_us": f"{peak * 1e6:.0f}",
    "peak_ratio": f"{schedule / peak:.2f}",
    "fetched_MB": f"{fetched / 1e6:.0f}",
    "hbm_us": f"{fetched / info.mem_bw_bytes_per_second * 1e6:.0f}",
    **limits,
  }


if __name__ == "__main__":
  main()
