# SPDX-License-Identifier: Apache-2.0
"""How long a step takes on GPUs, by estimate.

A GPU runs the launches of a step one after another. Each takes the longer of
its bytes and its products at the rates that an H100 reached, and a start. The
cores compute tiles of a product in waves, and the last wave counts as a full
one. Transfers beside which nothing is computed come on top. Between hosts,
every GPU has a network card of its own.

Nothing was fitted. What autotuning would choose is unknown without a GPU, and
so is how far the kernels of cuBLAS and cuDNN stay behind the rate of large
products. experiments/first_hour compares estimates with measured steps.
"""

from collections.abc import Mapping
import itertools
import math
from typing import Any

from attnres_jax.common import chips
from attnres_jax.common import gpus
from attnres_jax.plan import hlo

# From the end of a kernel to the work of the next one, in a CUDA graph.
START_SECONDS = 1e-6
# 400 Gbit/s, one way.
_NETWORK_BYTES_PER_SECOND = 50e9
# Tiles of a product, rows and columns.
_TILES = (128, 256), (256, 128), (128, 128)


def of_program(
  program: hlo.Program, chip: chips.Chip, device_kind: str
) -> dict[str, Any]:
  """Fields of a report: launches, and seconds of work and of transfers.

  `exposed_seconds` are part of `link_seconds`.

  Args:
    program: compiled for GPUs.
    chip: of `topology.chip`.
    device_kind: as JAX calls it.
  """
  cores = gpus.of_kind(device_kind).cores
  launches = seconds = 0.0
  for count, instruction, nbytes in program.instructions():
    if instruction.op.removesuffix("-start") in hlo.COLLECTIVES:
      continue
    flops = sum(
      program.product_flops(one) * _whole_waves(one, cores)
      for one in itertools.chain([instruction], program.inside(instruction))
    )
    launches += count
    seconds += count * max(
      nbytes / chip.hbm_bytes_per_second,
      flops / chip.reached_flops_per_second,
    )
  links = exposed = 0.0
  for one in program.collectives():
    across = len({place // gpus.PER_HOST for place in one.group}) > 1
    rate = _NETWORK_BYTES_PER_SECOND if across else chip.link_bytes_per_second
    transfer = one.count * (one.sent_bytes / rate + START_SECONDS)
    links += transfer
    exposed += transfer * (not one.overlapped)
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


def _whole_waves(product: hlo.Instruction, cores: int) -> float:
  """How much longer than its share of the rate its best tiles take.

  Fewer tiles than cores are cut along the sum, and keep all cores busy.
  """
  if product.op != "dot":
    return 1.0
  *rows, columns = product.arrays[0].dims
  height = math.prod(rows)
  found = []
  for tall, wide in _TILES:
    tiles = math.ceil(height / tall) * math.ceil(columns / wide)
    if tiles > cores:
      tiles = math.ceil(tiles / cores) * cores
    found.append(tiles * tall * wide / (height * columns))
  return min(found)
