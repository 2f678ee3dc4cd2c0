# SPDX-License-Identifier: Apache-2.0
"""How long a step takes on GPUs, by estimate.

A GPU runs the launches of a step one after another. Each takes the longer of
its bytes and its products, and a start. The cores compute tiles of a product in
waves, and the last wave counts as a full one. Transfers beside which nothing is
computed come on top. Between hosts, every GPU has a network card of its own.

Bytes move as fast as in a copy on an H100. Products in bfloat16 are as fast as
a large product of ones there; with normal numbers the clock is lower, by a
ratio that others have published. The rate of cuDNN's attention is published,
too. Products of highest precision take the cores' float32 arithmetic. Nothing
was fitted.

What autotuning would choose is unknown without a GPU, and so is how far a
fusion stays behind a copy: one that reads many arrays does, by much.
experiments/first_hour compares estimates with measured steps.
"""

import bisect
from collections.abc import Mapping, Sequence
import itertools
import math
from typing import Any

from attnres_jax.common import chips
from attnres_jax.common import gpus
from attnres_jax.plan import collectives
from attnres_jax.plan import gpu_products
from attnres_jax.plan import hlo

# From the end of a kernel to the work of the next one, in a CUDA graph.
START_SECONDS = 1e-6
# Float32 multiply-adds of a core and clock.
_FMAS = 128
# 400 Gbit/s, one way.
_NETWORK_BYTES_PER_SECOND = 50e9
# Tiles of a product, rows and columns: on tensor cores, and in float32.
_TILES = (128, 256), (256, 128), (128, 128)
_WIDE_TILES = *_TILES, (64, 64), (32, 32)
# Products of normal numbers take longer than of zeros: 257 and 295 TFLOP/s on
# an A100 (thonking.ai, "Strangely, matrix multiplications on GPUs run faster
# when given predictable data").
_NORMAL_NUMBERS = 257 / 295
# TFLOP/s of cuDNN's attention on an H100 by tokens of a row, forward (causal)
# and backward, with heads of 128 (arXiv:2407.08608, figures 5 and 6).
_ATTENTION_TOKENS = 512, 1024, 2048, 4096, 8192, 16384
_ATTENTION = {
  False: (315, 410, 484, 518, 529, 539),
  True: (305, 408, 465, 499, 518, 516),
}
_ATTENTION_PEAK = 989e12


def of_program(
  program: hlo.Program, chip: chips.Chip, device_kind: str
) -> dict[str, Any]:
  """Fields of a report: launches, and seconds of work and of transfers.

  `exposed_seconds` are part of `link_seconds`.
  """
  target = gpus.of_kind(device_kind)
  launches = seconds = 0.0
  for count, instruction, nbytes in program.instructions():
    if instruction.op.removesuffix("-start") in collectives.COLLECTIVES:
      continue
    products = sum(
      _product_seconds(program, inner, chip, target)
      for inner in itertools.chain([instruction], program.inside(instruction))
    )
    launches += count
    seconds += count * max(nbytes / chip.hbm_bytes_per_second, products)
  links = exposed = 0.0
  for op in collectives.of_program(program):
    across = len({place // gpus.PER_HOST for place in op.group}) > 1
    rate = _NETWORK_BYTES_PER_SECOND if across else chip.link_bytes_per_second
    transfer = op.count * (op.sent_bytes / rate + START_SECONDS)
    links += transfer
    exposed += transfer * (not op.overlapped)
  return dict(
    launches=launches,
    launch_seconds=launches * START_SECONDS,
    work_seconds=seconds,
    link_seconds=links,
    exposed_seconds=exposed,
  )


def step_seconds(report: Mapping[str, Any]) -> float:
  """The estimate of the module docstring, from fields of `of_program`."""
  work = report["work_seconds"] + report["launch_seconds"]
  return max(work + report["exposed_seconds"], report["link_seconds"])


def _product_seconds(
  program: hlo.Program,
  product: hlo.Instruction,
  chip: chips.Chip,
  target: gpus.Target,
) -> float:
  """Of one execution; 0 for what multiplies no matrices."""
  flops = program.product_flops(product)
  if not flops:
    return 0.0
  body = program.computations[product.place[0]]
  array = body[product.operands[0]].arrays[0]
  if gpu_products.is_attention(product):
    tokens = bisect.bisect_right(_ATTENTION_TOKENS, array.dims[1])
    rates = _ATTENTION[gpu_products.is_backward(product)]
    share = 1e12 * rates[max(0, tokens - 1)] / _ATTENTION_PEAK
    return flops / (share * chip.peak_flops_per_second)
  rate, tiles = _NORMAL_NUMBERS * chip.reached_flops_per_second, _TILES
  if array.dtype == "f32":
    rate /= 2
    if "highest" in product.attributes:
      rate, tiles = (
        1e9 * 2 * target.cores * _FMAS * target.clock_ghz,
        _WIDE_TILES,
      )
  return flops * _whole_waves(product, target.cores, tiles) / rate


def _whole_waves(
  product: hlo.Instruction, cores: int, sizes: Sequence[tuple[int, int]]
) -> float:
  """How much longer than its share of the rate its best tiles take.

  Fewer tiles than cores are cut along the sum, and keep all cores busy.
  """
  if product.op != "dot":
    return 1.0
  *rows, columns = product.arrays[0].dims
  height = math.prod(rows)
  waves = []
  for tall, wide in sizes:
    tiles = math.ceil(height / tall) * math.ceil(columns / wide)
    if tiles > cores:
      tiles = math.ceil(tiles / cores) * cores
    waves.append(tiles * tall * wide / (height * columns))
  return min(waves)
