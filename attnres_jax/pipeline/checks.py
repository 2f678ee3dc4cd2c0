# SPDX-License-Identifier: Apache-2.0
"""What of a configuration can be pipelined, and how a run is cut."""

from jax.sharding import Mesh

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.pipeline import layout as layout_lib


def layout(config: config_lib.RunConfig, mesh: Mesh) -> layout_lib.Layout:
  """Which sublayers each chunk has.

  Raises:
    ConfigError: names the field.
  """
  ranks, stages = mesh.shape[sharding.STAGE], config.pipeline.virtual_stages
  count = config.model.num_sublayers
  if mesh.shape[sharding.TENSOR] > 1:
    config_lib.fail(
      "mesh.tensor",
      mesh.shape[sharding.TENSOR],
      f"1 with mesh.stage={ranks}",
    )
  if config.model.value_residual:
    config_lib.fail(
      "model.value_residual", True, f"False with mesh.stage={ranks}"
    )
  if ranks > count:
    config_lib.fail(
      "mesh.stage", ranks, f"at most the {count} sublayers of the network"
    )
  if ranks * stages > count:
    config_lib.fail(
      "pipeline.virtual_stages",
      stages,
      f"at most {count // ranks}, since {count} sublayers leave some of"
      f" {ranks} (mesh.stage) x {stages} chunks empty",
    )
  sizes = layout_lib.split_sublayers(count, ranks * stages)
  return layout_lib.Layout(ranks, stages, sizes)


def num_microbatches(config: config_lib.RunConfig, mesh: Mesh) -> int:
  """M: the number of microbatches.

  Raises:
    ConfigError: names the nearest numbers that fit the mesh and the batch.
  """
  ranks = mesh.shape[sharding.STAGE]
  count = config.pipeline.microbatches or ranks
  if count % ranks:
    config_lib.fail(
      "pipeline.microbatches",
      count,
      f"a multiple of mesh.stage={ranks}, such as {_nearest(count, ranks)}",
    )
  if config.optim.accumulate_steps > 1:
    config_lib.fail(
      "optim.accumulate_steps",
      config.optim.accumulate_steps,
      f"1 with mesh.stage={ranks}, where pipeline.microbatches cuts the batch",
    )
  rows, unit = config.data.batch_size, sharding.num_row_shards(mesh) * count
  if rows % unit:
    config_lib.fail(
      "data.batch_size",
      rows,
      "a multiple of mesh.data x fsdp x expert x pipeline.microbatches ="
      f" {unit // count} x {count}, such as {_nearest(rows, unit)}",
    )
  return count


def _nearest(value: int, unit: int) -> str:
  below = value // unit * unit
  return f"{below} or {below + unit}" if below else str(unit)
