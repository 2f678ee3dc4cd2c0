# SPDX-License-Identifier: Apache-2.0
"""The network of an engine: dtypes, order and arrays of its weights."""

from typing import Any

import jax
from jax.experimental import layout as layout_lib
from jax.sharding import Mesh
from jax.sharding import Sharding

from attnres_jax import models
from attnres_jax.common import sharding
from attnres_jax.models import layer_stacks

# Where decoding is faster with separate arrays for each layer: a CPU copies a
# layer out of a stack to read it, and the whole stack to change it.
SEPARATE_ON = ("cpu",)


def platform_of(mesh: Mesh | None) -> str:
  """The platform of a mesh's devices, or of this process."""
  devices = jax.local_devices() if mesh is None else mesh.devices.flat
  return devices[0].platform


def abstract_prepared(
  model: models.Transformer, mesh: Mesh
) -> models.Transformer:
  """`prepared`, of abstract arrays, as a mesh shards it."""
  model = jax.eval_shape(prepared, model)
  model = sharding.with_sharding(model, sharding.state_sharding(model, mesh))
  if reads_products(platform_of(mesh)):
    model = sharding.with_sharding(model, formats(model))
  return model


def prepared(
  model: models.Transformer, separate: bool = False
) -> models.Transformer:
  """The network as an engine keeps it.

  Weights of products are in the dtype to which these cast them anyway. With
  `separate`, each layer gets separate arrays.
  """

  def cast(parameter: sharding.Parameter) -> jax.Array:
    value = parameter.value
    if parameter.wide or not parameter.is_matrix:
      return value
    return value.astype(model.config.dtype)

  model = sharding.map_parameters(cast, model)
  if separate:
    model.sublayers = layer_stacks.separated(model.sublayers)
  return model


def reads_products(platform: str) -> bool:
  """Whether devices of this platform need `formats`."""
  return platform == "tpu"


def formats(model: Any) -> Any:
  """Shardings of parameters, with the order of weights of several heads.

  A product x [B, D] W [D, N, H] reads the weights of a head as rows of D. By
  default, a TPU stores an array [D, N, H] as rows of heads, and a step of one
  token per slot would first rearrange all of these weights. They are a tenth of
  its bytes in a small network with grouped queries (compiled, not run).
  """

  def format_of(parameter: sharding.Parameter) -> Sharding | layout_lib.Format:
    placed, ndim = parameter.value.sharding, parameter.value.ndim
    _, _, columns = parameter.axes.rpartition("|")
    if not parameter.is_matrix or len(columns) < 2:
      return placed
    order = list(range(ndim))
    # [D, N, H] in the order N, D, H.
    rows = order.pop(ndim - len(columns) - 1)
    order.insert(ndim - 2, rows)
    return layout_lib.Format(layout_lib.Layout(tuple(order)), placed)

  return sharding.map_parameters(format_of, model)
