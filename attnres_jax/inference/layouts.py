# SPDX-License-Identifier: Apache-2.0
"""The order in which a TPU stores the weights that it decodes with.

A product x [B, D] W [D, N, H] reads the weights of a head as rows of D. By
default, an array [D, N, H] is stored as rows of heads, and a step that draws
one token per slot rearranges all of these weights first: of a small network
with grouped queries, a tenth of all bytes that it moves. So they are stored in
the order of products. Programs take weights in whatever order they are in.
"""

from typing import Any

from jax.experimental import layout as layout_lib
from jax.sharding import Sharding

from attnres_jax import sharding


def formats(model: Any) -> Any:
  """Shardings of parameters, with the order of weights of several heads.

  Args:
    model: a network of arrays or of shapes, which have shardings.

  Returns:
    A tree like it.
  """

  def one(parameter: sharding.Parameter) -> Sharding | layout_lib.Format:
    placed, ndim = parameter.value.sharding, parameter.value.ndim
    _, _, columns = parameter.axes.rpartition("|")
    if not parameter.is_matrix or len(columns) < 2:
      return placed
    order = list(range(ndim))
    # [D, N, H] in the order N, D, H.
    rows = order.pop(ndim - len(columns) - 1)
    order.insert(ndim - 2, rows)
    return layout_lib.Format(layout_lib.Layout(tuple(order)), placed)

  return sharding.map_parameters(one, model)


def reads_products(platform: str) -> bool:
  """Whether devices of this platform need `formats`."""
  return platform == "tpu"
