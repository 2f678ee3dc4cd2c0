# SPDX-License-Identifier: Apache-2.0
"""Device meshes: axes, how activations lie over them, and rows of a process."""

from collections.abc import Mapping, Sequence
import contextlib
import math
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from attnres_jax import config as config_lib

STAGE, DATA, FSDP, EXPERT, TENSOR = AXES = (
  "stage",
  "data",
  "fsdp",
  "expert",
  "tensor",
)
# The axes over which rows of a batch are sharded.
ROWS = (DATA, FSDP, EXPERT)
# Shardings of activations: [B, T, D] between sublayers, [Q, B, T, ...] for the
# queries of a depth block, [B, T, N, ...] inside a mixer, [B, N, ...] in its
# cache, and replicated. And of a mixer's weights [W, N, ...] and [N, ...].
TOKENS = PartitionSpec(ROWS, TENSOR)
QUERIED_TOKENS = PartitionSpec(None, ROWS, TENSOR)
HEADS = PartitionSpec(ROWS, None, TENSOR)
ROWS_AND_HEADS = PartitionSpec(ROWS, TENSOR)
HEAD_WEIGHTS = PartitionSpec(None, TENSOR)
FIRST_AXIS = PartitionSpec(TENSOR)
SEQUENCES = PartitionSpec(ROWS)
WHOLE = PartitionSpec()


def make_mesh(
  config: config_lib.MeshConfig, devices: Sequence[Any] | None = None
) -> Mesh:
  """A mesh over the devices of all processes, or over the given devices.

  If the devices are in several slices (pods without a direct link), only `data`
  crosses slices, once per step. Axes of the mesh are axes of the torus if sizes
  allow it, and parts of them otherwise, as with 8 x 8 on 4x4x4.

  Raises:
    ConfigError: the sizes need more devices than there are, or do not divide
      them; names sizes that fit.
  """
  available = list(jax.devices() if devices is None else devices)
  sizes = _axis_sizes(config, len(available))
  used = available[: math.prod(sizes.values())]
  num_slices = len({getattr(device, "slice_index", 0) for device in used})
  shape = tuple(sizes.values())
  if num_slices == 1:
    grid = mesh_utils.create_device_mesh(
      shape, used, allow_split_physical_axes=True
    )
  else:
    if sizes[DATA] % num_slices:
      config_lib.fail(
        "mesh.data",
        sizes[DATA],
        f"a multiple of the {num_slices} slices, such as"
        f" {-(-sizes[DATA] // num_slices) * num_slices}",
      )
    across = [num_slices if axis == DATA else 1 for axis in AXES]
    inner = [size // slices for size, slices in zip(shape, across)]
    grid = mesh_utils.create_hybrid_device_mesh(
      inner, across, used, allow_split_physical_axes=True
    )
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_divides(config: config_lib.RunConfig, mesh: Mesh) -> None:
  """Refuses a run whose microbatches cannot be split over the mesh.

  Raises:
    ConfigError: names the nearest valid batch sizes.
  """
  rows, parts = config.data.batch_size, config.optim.accumulate_steps
  if not parts:
    config_lib.fail(
      "optim.accumulate_steps",
      0,
      "a number, or a plan (attnres_jax.common.plans)",
    )
  unit = parts * num_row_shards(mesh)
  if rows % unit:
    below, above = rows // unit * unit, -(-rows // unit) * unit
    nearest = f"{below} or {above}" if below else str(above)
    config_lib.fail(
      "data.batch_size",
      rows,
      "a multiple of mesh.data x fsdp x expert x optim.accumulate_steps ="
      f" {num_row_shards(mesh)} x {parts}, such as {nearest}",
    )
  length, tensor = config.data.sequence_length, mesh.shape[TENSOR]
  if length % tensor:
    config_lib.fail(
      "data.sequence_length",
      length,
      f"a multiple of mesh.tensor={tensor}, such as"
      f" {-(-length // tensor) * tensor}",
    )


def num_row_shards(mesh: Mesh) -> int:
  """The number of parts into which the rows of a batch are split."""
  return math.prod(mesh.shape[axis] for axis in ROWS)


def share_of_rows(mesh: Mesh, process: int) -> tuple[int, int]:
  """Which part of a batch a process reads, and how many parts there are.

  Processes whose devices differ only in `stage` and `tensor` work on the same
  rows, and so read the same part.

  Raises:
    ConfigError: the rows of two processes overlap but are not the same, or a
      process has no device of the mesh.
  """
  places = np.arange(num_row_shards(mesh))
  places = places.reshape([mesh.shape[axis] for axis in ROWS])
  seen: dict[int, set[int]] = {}
  for (_, *rows, _), device in np.ndenumerate(mesh.devices):
    seen.setdefault(device.process_index, set()).add(int(places[tuple(rows)]))
  parts = sorted({tuple(sorted(rows)) for rows in seen.values()})
  sizes = " x ".join(f"{n} {axis}" for axis, n in mesh.shape.items())
  if {len(part) for part in parts} != {places.size // len(parts)}:
    config_lib.fail(
      "mesh",
      sizes,
      f"sizes that give any two of {len(seen)} processes the same rows of a"
      " batch or none in common",
    )
  # Every process looks for all, or the others would wait for one that ends.
  absent = set(range(jax.process_count())) - seen.keys()
  if absent:
    config_lib.fail(
      "mesh",
      sizes,
      f"sizes that use devices of all processes; process {min(absent)} has"
      " none",
    )
  return parts.index(tuple(sorted(seen[process]))), len(parts)


def replicated(mesh: Mesh) -> NamedSharding:
  """Sharding of metrics and counters: replicated."""
  return NamedSharding(mesh, WHOLE)


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Sharding of [B, ...] batches: rows over `ROWS`."""
  return NamedSharding(mesh, SEQUENCES)


def ambient(mesh: Mesh) -> contextlib.AbstractContextManager:
  """A context for tracing that tells functions such as `by_shards` the mesh."""
  return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def shard_batch(
  batch: Mapping[str, np.ndarray], mesh: Mesh
) -> dict[str, jax.Array]:
  """Joins the rows of all processes into global arrays on the mesh."""
  sharding = batch_sharding(mesh)
  return {
    name: jax.make_array_from_process_local_data(sharding, rows)
    for name, rows in batch.items()
  }


def _axis_sizes(
  config: config_lib.MeshConfig, available: int
) -> dict[str, int]:
  """Sizes in the order of `AXES`, with -1 filled in."""
  given = {a: n for a in AXES if (n := getattr(config, a)) != -1}
  product = math.prod(given.values())
  fills = len(given) < len(AXES)
  fitting = divisors(available) if fills else range(1, available + 1)
  if product not in fitting:
    # One axis that does not fit by itself, else all that are cut.
    wrong = [axis for axis, size in given.items() if size not in fitting]
    if len(wrong) != 1 or product // given[wrong[0]] not in fitting:
      wrong = [axis for axis, size in given.items() if size > 1]
    size = math.prod(given[axis] for axis in wrong)
    rest = product // size
    near = nearest(size, [n // rest for n in fitting if n % rest == 0])
    kind = "a divisor of" if fills else "at most"
    times = f" / {rest}, the size of the other axes" if rest > 1 else ""
    config_lib.fail(
      " x ".join(f"mesh.{axis}" for axis in wrong),
      size,
      f"{kind} {available} devices{times}, such as {near}",
    )
  return {axis: given.get(axis, available // product) for axis in AXES}


def divisors(number: int) -> list[int]:
  return [n for n in range(1, number + 1) if number % n == 0]


def nearest(size: int, fitting: Sequence[int]) -> str:
  near = sorted(fitting, key=lambda n: abs(n - size))[:2]
  return " or ".join(map(str, sorted(near)))
