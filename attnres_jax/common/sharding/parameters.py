# SPDX-License-Identifier: Apache-2.0
"""How parameters are sharded, from the letters of their axes."""

from collections.abc import Callable, Sequence
import math
from typing import Any, NamedTuple

from flax import nnx
import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from attnres_jax import config as config_lib
from attnres_jax.common.sharding import mesh as mesh_lib

# Letter of an axis of a matrix (see `attnres_jax.models`) -> the mesh axis that
# shards it. Other letters are not sharded: a head, a rank, scores of experts.
CUTS = {
  "D": mesh_lib.FSDP,
  "N": mesh_lib.TENSOR,
  "K": mesh_lib.TENSOR,
  "F": mesh_lib.TENSOR,
  "V": mesh_lib.TENSOR,
}
# The same for axes that stack matrices. Whole experts are gathered: parts of
# their matrices would have to be put together, by copies of all of them.
STACK_CUTS = {"E": (mesh_lib.EXPERT, mesh_lib.FSDP)}


class Parameter(NamedTuple):
  """A parameter's value, with the metadata from its creation.

  Attributes:
    name: its path, with slashes.
    axes: letters, such as `D|NH`.
    decays: whether weight decay applies to it.
    load: whether it is a selection bias of experts, whose gradient is their
      load.
    wide: whether its products are in float32, whatever the dtype of
      activations is.
    value: an array or a `ShapeDtypeStruct`. Leading axes that `axes` does not
      name are stacked sublayers.
  """

  name: str
  axes: str
  decays: bool
  load: bool
  wide: bool
  value: Any

  @property
  def is_matrix(self) -> bool:
    return "|" in self.axes


def map_parameters(
  function: Callable[[Parameter], Any],
  tree: Any,
  other: Callable[[Any], Any] | None = None,
) -> Any:
  """The tree with each parameter's value replaced by `function` of it.

  In an optimiser's state, moments are treated like values. `other` maps leaves
  that are not in a parameter, such as counters.

  Raises:
    ConfigError: a parameter has no axes; `other` is missing.
  """

  def of_node(path: Any, node: Any) -> Any:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if isinstance(node, nnx.Variable):
      metadata = node.get_metadata()
      if "axes" in metadata:
        about = metadata.get("decays", True), metadata.get("load", False)
        about = metadata["axes"], *about, metadata.get("wide", False)
        return jax.tree.map(
          lambda x: function(Parameter(name, *about, x)), node
        )
    elif other is not None:
      return other(node)
    raise config_lib.ConfigError(
      f"{name} has no axes; name them where it is made, such as"
      " nnx.Param(value, axes='D|F') (see attnres_jax.models)"
    )

  return jax.tree_util.tree_map_with_path(
    of_node, tree, is_leaf=lambda node: isinstance(node, nnx.Variable)
  )


def state_sharding(tree: Any, mesh: Mesh) -> Any:
  """The sharding of each leaf of a model or train state, by `CUTS`.

  Leaves other than parameters are replicated.

  Raises:
    ConfigError: an axis of the mesh does not divide the dimension it shards.
  """

  def at_node(parameter: Parameter) -> NamedSharding:
    spec = at_rest(parameter)
    _check_cut(parameter.name, parameter.value.shape, spec, mesh)
    return NamedSharding(mesh, spec)

  return map_parameters(at_node, tree, lambda _: mesh_lib.replicated(mesh))


def at_rest(parameter: Parameter) -> PartitionSpec:
  """How a parameter (or its moments) is sharded between steps."""
  cuts = _cuts(parameter.axes)
  stacked = parameter.value.ndim - len(cuts) if cuts else 0
  axes = [
    (*_named(a), mesh_lib.STAGE) if mesh_lib.FSDP in _named(a) else a
    for a in cuts
  ]
  return PartitionSpec(*[None] * stacked, *axes)


def axes_at_rest(parameter: Parameter) -> set[str]:
  """The mesh axes that shard a parameter between steps."""
  return {axis for axes in at_rest(parameter) for axis in _named(axes)}


def row_cut(axes: str) -> PartitionSpec:
  """How `ROWS` shard a matrix of one sublayer with these letters."""
  return PartitionSpec(
    *(
      a if {*mesh_lib.ROWS}.issuperset(_named(a)) else None for a in _cuts(axes)
    )
  )


def with_sharding(tree: Any, shardings: Any) -> Any:
  """A tree of `ShapeDtypeStruct`s, each with its sharding."""
  return jax.tree.map(
    lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
    tree,
    shardings,
  )


def bytes_per_device(tree: Any) -> int:
  """Bytes of arrays, or of `ShapeDtypeStruct`s, on each device of a mesh."""

  def shard_bytes(leaf):
    shape = leaf.sharding.shard_shape(leaf.shape)
    return leaf.dtype.itemsize * math.prod(shape)

  return sum(map(shard_bytes, jax.tree.leaves(tree)))


def _cuts(axes: str) -> Sequence[str | tuple[str, ...] | None]:
  """The mesh axes of each letter of a matrix; none for a vector."""
  if "|" not in axes:
    return []
  *stack, rows, columns = axes.split("|")
  stacked = [STACK_CUTS.get(letter) for letter in "".join(stack)]
  taken = {axis for axes in stacked for axis in _named(axes)}
  cuts = (CUTS.get(letter) for letter in rows + columns)
  return [*stacked, *(None if axis in taken else axis for axis in cuts)]


def _named(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
  """The mesh axes of one entry of a PartitionSpec."""
  if axes is None:
    return ()
  return axes if isinstance(axes, tuple) else (axes,)


def _check_cut(
  name: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh
) -> None:
  for size, axes in zip(shape, spec):
    cut = [axis for axis in _named(axes) if mesh.shape[axis] > 1]
    parts = math.prod(mesh.shape[axis] for axis in cut)
    if size % parts:
      config_lib.fail(
        " x ".join(f"mesh.{axis}" for axis in cut),
        parts,
        f"a divisor of {size}, which it cuts in {name} {shape}, such as"
        f" {mesh_lib.nearest(parts, mesh_lib.divisors(size))}",
      )
