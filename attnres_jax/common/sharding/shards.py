# SPDX-License-Identifier: Apache-2.0
"""Functions of each device's part, which the compiler cannot partition."""

from collections.abc import Callable, Sequence
import contextlib
from typing import Any

import jax
from jax.sharding import PartitionSpec

from attnres_jax.common.sharding import mesh as mesh_lib

# What is not sharded over tokens, if it cannot be.
_BY_ROW = {
  mesh_lib.TOKENS: mesh_lib.SEQUENCES,
  mesh_lib.QUERIED_TOKENS: PartitionSpec(None, mesh_lib.ROWS),
}


def keep_tokens(x_BTD: jax.Array) -> jax.Array:
  """Constrains activations to be sharded as `TOKENS`.

  Without this, the compiler might keep a parameter in place and send the
  activations. Outside of `ambient` this is the identity. Tokens that `tensor`
  does not divide, such as one that is decoded, are sharded by rows only.
  """
  if not _mesh_to_split_over():
    return x_BTD
  tensor = jax.sharding.get_abstract_mesh().shape.get(mesh_lib.TENSOR, 1)
  spec = mesh_lib.SEQUENCES if x_BTD.shape[1] % tensor else mesh_lib.TOKENS
  return jax.lax.with_sharding_constraint(x_BTD, _unsplit(spec))


_scattering = jax.make_user_context(False)


def scattering(length: int) -> contextlib.AbstractContextManager:
  """A context for rows of `length` tokens, whose sums are scattered over them.

  The memory-efficient prefill of the paper (arXiv:2603.15031 section 4.2): a
  sublayer gathers its normalised input (`gather_tokens`), and its output, a sum
  over the heads or hidden units of all devices along `tensor`, is scattered
  over tokens (`scatter_sum`). What is between sublayers is of the device's own
  tokens. Together these send as much as the all-reduce that they replace.

  Without a mesh, or if `tensor` does not divide the tokens, nothing is.
  """
  tensor = jax.sharding.get_abstract_mesh().shape.get(mesh_lib.TENSOR, 1)
  return _scattering(
    _mesh_to_split_over() and tensor > 1 and length % tensor == 0
  )


def scatters() -> bool:
  """Whether this runs in `scattering`, and it applies."""
  return _scattering.value and _mesh_to_split_over()


def gather_tokens(x_BTD: jax.Array) -> jax.Array:
  """In `scattering`, gives each device all tokens of its rows."""
  if not scatters():
    return x_BTD
  return jax.lax.with_sharding_constraint(x_BTD, _unsplit(mesh_lib.SEQUENCES))


def scatter_sum(function: Callable[..., jax.Array], *in_specs: Any) -> Any:
  """In `scattering`, a sum over `tensor` of what each device computes.

  Elsewhere, the function itself. Its result [B, T, D] is a sum over what
  `tensor` shards, and specs say how each argument is sharded.
  """
  if not scatters():
    return function

  def part(*args: Any) -> jax.Array:
    return jax.lax.psum_scatter(
      function(*args), mesh_lib.TENSOR, scatter_dimension=1, tiled=True
    )

  return by_shards(part, in_specs, mesh_lib.TOKENS)


def by_shards(
  function: Callable[..., Any],
  in_specs: Any,
  out_specs: Any,
  axes: Sequence[str] = mesh_lib.AXES,
) -> Callable[..., Any]:
  """Makes every device compute `function` on its own shards of the arguments.

  For functions that the compiler cannot partition: it refuses Pallas kernels,
  and would gather rows that have to be sorted. Without an ambient mesh, with a
  single device along `axes`, or inside another `by_shards`, this is the
  function itself. Tokens that `tensor` does not divide are sharded by rows, as
  in `keep_tokens`.

  Args:
    function: of arrays; shards must not depend on each other.
    in_specs: how each argument is sharded, such as `TOKENS`. The gradient of an
      argument that is `WHOLE` is the sum over all devices.
    out_specs: how the results are sharded.
    axes: the axes of the specs; the compiler partitions along the others.
  """
  if not _mesh_to_split_over(axes):
    return function

  def split(*args: Any) -> Any:
    specs = in_specs, out_specs
    if not _tensor_divides_tokens(in_specs, args):
      specs = _map_specs(lambda spec: _BY_ROW.get(spec, spec), specs)
    specs = _map_specs(_unsplit, specs)
    # Unchecked, so that gradients of replicated arguments are summed by the
    # transpose rule rather than by every gradient rule inside.
    return jax.shard_map(
      function,
      in_specs=specs[0],
      out_specs=specs[1],
      axis_names=unsplit_axes().keys() & {*axes},
      check_vma=False,
    )(*args)

  return split


def by_rows(
  function: Callable[[Any, Any], Any], cuts: Any = mesh_lib.WHOLE
) -> Callable[[Any, Any], Any]:
  """`by_shards` for `function(rows, shared)`, with parameters as `shared`.

  All leaves of `rows` and of the result are [B, ...]. The compiler decides how
  `tensor` shards the parameters; `cuts` say how each one is sharded besides,
  such as by its `row_cut`.
  """
  return by_shards(
    function, (mesh_lib.SEQUENCES, cuts), mesh_lib.SEQUENCES, mesh_lib.ROWS
  )


def by_copies(
  function: Callable[[Any, Any], Any], total: Callable[[Any, str], Any]
) -> Callable[[Any, Any], Any]:
  """Makes the devices along `data` compute `function(shared, rows)` apart.

  They have copies of all parameters. Each device then adds up the gradients of
  all microbatches and sends the sum once; otherwise every microbatch would send
  gradients. Within, `by_shards` splits over the other axes. Leaves of `rows`
  are [B, ...], and `total` combines the results of all devices along a named
  axis.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.shape.get(mesh_lib.DATA, 1) == 1:
    return function
  return jax.shard_map(
    lambda *args: total(function(*args), mesh_lib.DATA),
    in_specs=(mesh_lib.WHOLE, PartitionSpec(mesh_lib.DATA)),
    out_specs=mesh_lib.WHOLE,
    axis_names={mesh_lib.DATA},
    check_vma=False,
  )


def within_copies(x: jax.Array, spec: PartitionSpec) -> jax.Array:
  """Within `by_copies`, constrains how an array is sharded."""
  if jax.sharding.get_abstract_mesh().manual_axes != (mesh_lib.DATA,):
    return x
  return jax.lax.with_sharding_constraint(x, spec)


def stacked_sequences(number: int) -> PartitionSpec:
  """`SEQUENCES`, with so many axes before the rows."""
  return PartitionSpec(*(None,) * number, mesh_lib.ROWS)


def unsplit_axes() -> dict[str, int]:
  """The ambient mesh's axes that the compiler splits along, and their sizes."""
  mesh = jax.sharding.get_abstract_mesh()
  manual = mesh.manual_axes
  return {axis: n for axis, n in mesh.shape.items() if axis not in manual}


def on_one_device(function: Callable[..., Any]) -> Callable[..., Any]:
  """A function of Pallas kernels that can be called within `by_rows`.

  The compiler refuses to split them, even along axes of a single device, which
  all `unsplit_axes` have to be.
  """
  axes = unsplit_axes()
  if not axes or not jax.sharding.get_abstract_mesh().manual_axes:
    return function
  return jax.shard_map(
    function,
    in_specs=mesh_lib.WHOLE,
    out_specs=mesh_lib.WHOLE,
    axis_names=set(axes),
    check_vma=False,
  )


def cut_dim(part: jax.Array, dim: int, size: int) -> int | None:
  """`dim` if `part` is smaller than `size` there; None if it is whole."""
  return None if part.shape[dim] == size else dim


def gather_parts(
  part: jax.Array, dim: int | None, dtype: jax.typing.DTypeLike
) -> jax.Array:
  """Within `by_shards`, gathers a parameter that `fsdp` cuts along `dim`.

  The dimension, from `cut_dim`, is None if it is whole already. It is sent in
  the dtype in which it is used: half the bytes of master weights for products
  in bfloat16. No gradient rule, since the gradient has to be float32: see
  `sum_parts`.
  """
  part = part.astype(dtype)
  if dim is None:
    return part
  return jax.lax.all_gather(part, mesh_lib.FSDP, axis=dim, tiled=True)


def sum_parts(total: jax.Array, dim: int | None) -> jax.Array:
  """This device's part of a sum over `fsdp`, as cut for `gather_parts`."""
  if dim is None:
    return total
  return jax.lax.psum_scatter(
    total, mesh_lib.FSDP, scatter_dimension=dim, tiled=True
  )


def _mesh_to_split_over(axes: Sequence[str] = mesh_lib.AXES) -> bool:
  manual = jax.sharding.get_abstract_mesh().manual_axes
  return {mesh_lib.DATA}.issuperset(manual) and any(
    unsplit_axes().get(axis, 1) > 1 for axis in axes
  )


def _unsplit(spec: PartitionSpec) -> PartitionSpec:
  """A spec without the axes over which `by_copies` has split already."""
  axes = unsplit_axes()

  def rest(entry: Any) -> Any:
    names = entry if isinstance(entry, tuple) else (entry,)
    return tuple(a for a in names if a in axes) or None

  return PartitionSpec(*map(rest, spec))


def _tensor_divides_tokens(in_specs: Any, args: Sequence[Any]) -> bool:
  """Whether `tensor` divides the tokens of all arguments sharded over it."""
  tensor = jax.sharding.get_abstract_mesh().shape.get(mesh_lib.TENSOR, 1)

  def divides(spec: PartitionSpec, arg: Any) -> bool:
    axis = {mesh_lib.TOKENS: 1, mesh_lib.QUERIED_TOKENS: 2}.get(spec)
    leaves = [] if axis is None else jax.tree.leaves(arg)
    return all(leaf.shape[axis] % tensor == 0 for leaf in leaves)

  return all(jax.tree.leaves(_map_specs(divides, in_specs, tuple(args))))


def _map_specs(function: Callable[..., Any], specs: Any, *trees: Any) -> Any:
  is_spec = lambda node: isinstance(node, PartitionSpec)
  return jax.tree.map(function, specs, *trees, is_leaf=is_spec)
