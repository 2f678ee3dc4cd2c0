# SPDX-License-Identifier: Apache-2.0
"""Device meshes, and where arrays live on them.

The only place that spells mesh axes. For now there is one, `data`: parameters
and optimiser state are replicated, batches are split by rows.
"""

from collections.abc import Callable, Mapping
import contextlib
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from attnres_jax import config as config_lib

DATA = "data"


def make_mesh(config: config_lib.MeshConfig) -> Mesh:
  """A mesh over the first `config.data` devices of all processes.

  Raises:
    ConfigError: more devices are asked for than there are.
  """
  available = jax.devices()
  num_devices = len(available) if config.data == -1 else config.data
  if num_devices > len(available):
    config_lib.fail(
      "mesh.data", config.data, f"at most {len(available)}, the devices here"
    )
  return jax.make_mesh(
    (num_devices,),
    (DATA,),
    axis_types=(AxisType.Auto,),
    devices=available[:num_devices],
  )


def check_divides(config: config_lib.RunConfig, mesh: Mesh) -> None:
  """Stops a run whose microbatches cannot be split over the mesh.

  Raises:
    ConfigError: naming the nearest batch sizes that can.
  """
  rows, parts = config.data.batch_size, config.optim.accumulate_steps
  unit = parts * mesh.size
  if rows % unit:
    below, above = rows // unit * unit, -(-rows // unit) * unit
    nearest = f"{below} or {above}" if below else str(above)
    config_lib.fail(
      "data.batch_size",
      rows,
      f"a multiple of mesh devices x optim.accumulate_steps = {mesh.size} x"
      f" {parts}, such as {nearest}",
    )


def replicated(mesh: Mesh) -> NamedSharding:
  """Sharding of parameters, optimiser state and metrics."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Sharding of [B, ...] batches: rows over `data`."""
  return NamedSharding(mesh, PartitionSpec(DATA))


def ambient(mesh: Mesh) -> contextlib.AbstractContextManager:
  """What is traced within it may ask which mesh it is for: `by_rows` does."""
  return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def by_rows(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
  """Has every device compute `function(rows, shared)` for its own rows only.

  For computations over which rows are independent and that the compiler cannot
  split by itself, such as sorting. Where no mesh is ambient, or it has one
  device along `data`, this is the function itself. All leaves of `rows` and of
  the result are [B, ...]; `shared` is the same on all devices, and its gradient
  is their sum.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.shape.get(DATA, 1) == 1 or DATA in mesh.manual_axes:
    return function
  # Unchecked, gradients of `shared` are summed by the rule of transposition
  # rather than by every gradient rule inside.
  return jax.shard_map(
    function,
    in_specs=(PartitionSpec(DATA), PartitionSpec()),
    out_specs=PartitionSpec(DATA),
    axis_names={DATA},
    check_vma=False,
  )


def shard_batch(
  batch: Mapping[str, np.ndarray], mesh: Mesh
) -> dict[str, jax.Array]:
  """Joins each process's rows into global arrays on the mesh."""
  sharding = batch_sharding(mesh)
  return {
    name: jax.make_array_from_process_local_data(sharding, rows)
    for name, rows in batch.items()
  }


def with_sharding(tree: Any, sharding: NamedSharding) -> Any:
  """The same tree of `ShapeDtypeStruct`, each with a sharding."""
  return jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree
  )
