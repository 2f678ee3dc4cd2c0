# SPDX-License-Identifier: Apache-2.0
"""Arrays of older checkpoints, under today's names and in today's shapes.

Gate and up of routed experts were two arrays [*stack, E, D, F]. They are one
array [*stack, E, G, F, D] now, and so are their moments.
"""

from collections.abc import Mapping
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

Shape = tuple[int, ...]

_NAME = re.compile(r"(.*\bmoe/(?:\d+/)?core/)gate_and_up(/.*)")
_OLD_NAME = re.compile(r"(.*\bmoe/(?:\d+/)?core/)gate(/.*)")


def joined_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
  """Shapes of stored arrays, as if today's code had stored them."""
  joined = dict(shapes)
  for name in shapes:
    if match := _OLD_NAME.fullmatch(name):
      new = f"{match[1]}gate_and_up{match[2]}"
      gate, up = _old_names(new)
      if joined.get(up) == joined[gate]:
        *stack, rows, columns = joined.pop(gate)
        del joined[up]
        joined[new] = (*stack, 2, columns, rows)
  return joined


def split(
  abstract: Mapping[str, Any], shapes: Mapping[str, Shape]
) -> dict[str, Any]:
  """The arrays to read for `abstract`, given the shapes of stored arrays."""
  arrays: dict[str, Any] = {}
  for name, leaf in abstract.items():
    names = () if name in shapes else _old_names(name)
    arrays |= {old: _transposed(leaf) for old in names} or {name: leaf}
  return arrays


def join(
  arrays: dict[str, Any], abstract: Mapping[str, Any]
) -> dict[str, jax.Array]:
  """The arrays of `abstract`, from what `split` says; empties `arrays`."""
  joined = {}
  for name, leaf in abstract.items():
    if name in arrays:
      joined[name] = arrays.pop(name)
    else:
      joined[name] = _stacked(
        [arrays.pop(old) for old in _old_names(name)], leaf
      )
  return joined


def _old_names(name: str) -> tuple[str, ...]:
  match = _NAME.fullmatch(name)
  if not match:
    return ()
  return tuple(f"{match[1]}{old}{match[2]}" for old in ("gate", "up"))


def _transposed(leaf: Any) -> jax.ShapeDtypeStruct:
  """What gate, or up, of an array was."""
  *stack, _, rows, columns = leaf.shape
  place = leaf.sharding
  if isinstance(place, NamedSharding):
    missing = leaf.ndim - len(place.spec)
    *cuts, _, row_cut, column_cut = *place.spec, *[None] * missing
    spec = PartitionSpec(*cuts, column_cut, row_cut)
    place = NamedSharding(place.mesh, spec)
  shape = *stack, columns, rows
  return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=place)


def _stacked(parts: list[jax.Array], leaf: Any) -> jax.Array:
  @jax.jit(out_shardings=leaf.sharding)
  def stack(parts):
    return jnp.stack([jnp.swapaxes(p, -1, -2) for p in parts], axis=-3)

  return stack(parts)
