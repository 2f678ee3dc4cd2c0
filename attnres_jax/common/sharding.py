# SPDX-License-Identifier: Apache-2.0
"""Device meshes, and how arrays are sharded over them.

The only module with names of mesh axes:

  stage    ranks of a pipeline: each computes chunks of the depth for all rows.
           Between steps, parameters are sharded over it as over fsdp
  data     rows of a batch; parameters are copies of each other
  fsdp     rows of a batch; parameters and optimiser state are sharded, and
           gathered where they are used
  expert   rows of a batch; each device owns some experts, and tokens are sent
           to them. Between uses, fsdp shards the experts of a device: each
           matrix stays in one piece
  tensor   heads, hidden units and vocabulary of every matrix; all devices
           compute on the same rows. Between sublayers, where tokens are
           independent, each has its own tokens (sequence parallelism)

The letters of a parameter's axes say how it is sharded, by `CUTS`. Gains,
pseudo-queries, per-head scalars, short convolutions and biases are not
matrices, and are replicated. Optimiser state follows its parameter, and so do
checkpoints, which restore onto any mesh.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import math
from typing import Any, NamedTuple

from flax import nnx
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
PER_DEVICE = PartitionSpec((*ROWS, TENSOR))
# What is not sharded over tokens, if it cannot be.
_BY_ROW = {
  TOKENS: SEQUENCES,
  QUERIED_TOKENS: PartitionSpec(None, ROWS),
  PER_DEVICE: SEQUENCES,
}

# Letter of an axis of a matrix (see `attnres_jax.models`) -> the mesh axis that
# shards it. Other letters are not sharded: a head, a rank, scores of experts.
CUTS = {"D": FSDP, "N": TENSOR, "K": TENSOR, "F": TENSOR, "V": TENSOR}
# The same for axes that stack matrices. Whole experts are gathered: parts of
# their matrices would have to be put together, by copies of all of them.
STACK_CUTS = {"E": (EXPERT, FSDP)}


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

  In an optimiser's state, moments are treated like values.

  Args:
    function: see above.
    tree: of `nnx.Param`s.
    other: maps leaves that are not in a parameter, such as counters.

  Raises:
    ConfigError: a parameter has no axes; `other` is missing.
  """

  def one(path: Any, node: Any) -> Any:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if isinstance(node, nnx.Variable):
      said = node.get_metadata()
      if "axes" in said:
        about = said.get("decays", True), said.get("load", False)
        about = said["axes"], *about, said.get("wide", False)
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
    one, tree, is_leaf=lambda node: isinstance(node, nnx.Variable)
  )


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


def state_sharding(tree: Any, mesh: Mesh) -> Any:
  """The sharding of each leaf of a model or train state, by `CUTS`.

  Args:
    tree: of `nnx.Param`s; other leaves are replicated.
    mesh: of `make_mesh`.

  Raises:
    ConfigError: an axis of the mesh does not divide the dimension it shards.
  """

  def one(parameter: Parameter) -> NamedSharding:
    spec = at_rest(parameter)
    _check_cut(parameter.name, parameter.value.shape, spec, mesh)
    return NamedSharding(mesh, spec)

  return map_parameters(one, tree, lambda _: replicated(mesh))


def at_rest(parameter: Parameter) -> PartitionSpec:
  """How a parameter (or its moments) is sharded between steps."""
  cuts = _cuts(parameter.axes)
  stacked = parameter.value.ndim - len(cuts) if cuts else 0
  axes = [(*_named(a), STAGE) if FSDP in _named(a) else a for a in cuts]
  return PartitionSpec(*[None] * stacked, *axes)


def axes_at_rest(parameter: Parameter) -> set[str]:
  """The mesh axes that shard a parameter between steps."""
  return {axis for axes in at_rest(parameter) for axis in _named(axes)}


def ambient(mesh: Mesh) -> contextlib.AbstractContextManager:
  """A context for tracing that tells functions such as `by_shards` the mesh."""
  return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def keep_tokens(x_BTD: jax.Array) -> jax.Array:
  """Constrains activations to be sharded as `TOKENS`.

  Without this, the compiler might keep a parameter in place and send the
  activations. Outside of `ambient` this is the identity. Tokens that `tensor`
  does not divide, such as one that is decoded, are sharded by rows only.
  """
  if not _mesh_to_split_over():
    return x_BTD
  tensor = jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1)
  spec = SEQUENCES if x_BTD.shape[1] % tensor else TOKENS
  return jax.lax.with_sharding_constraint(x_BTD, spec)


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
  tensor = jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1)
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
  return jax.lax.with_sharding_constraint(x_BTD, SEQUENCES)


def scatter_sum(function: Callable[..., jax.Array], *in_specs: Any) -> Any:
  """In `scattering`, a sum over `tensor` of what each device computes.

  Elsewhere, the function itself.

  Args:
    function: of arrays, to [B, T, D]; a sum over what `tensor` shards.
    *in_specs: how each argument is sharded.
  """
  if not scatters():
    return function

  def part(*args: Any) -> jax.Array:
    return jax.lax.psum_scatter(
      function(*args), TENSOR, scatter_dimension=1, tiled=True
    )

  return by_shards(part, in_specs, TOKENS)


def by_shards(
  function: Callable[..., Any],
  in_specs: Any,
  out_specs: Any,
  axes: Sequence[str] = AXES,
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
    # Unchecked, so that gradients of replicated arguments are summed by the
    # transpose rule rather than by every gradient rule inside.
    return jax.shard_map(
      function,
      in_specs=specs[0],
      out_specs=specs[1],
      axis_names=set(axes),
      check_vma=False,
    )(*args)

  return split


def by_rows(
  function: Callable[[Any, Any], Any], cuts: Any = WHOLE
) -> Callable[[Any, Any], Any]:
  """`by_shards` for `function(rows, shared)`, with parameters as `shared`.

  All leaves of `rows` and of the result are [B, ...]. The compiler decides how
  `tensor` shards the parameters.

  Args:
    function: see above.
    cuts: how each parameter is sharded, such as by its `row_cut`.
  """
  return by_shards(function, (SEQUENCES, cuts), SEQUENCES, ROWS)


def stacked_sequences(number: int) -> PartitionSpec:
  """`SEQUENCES`, with so many axes before the rows."""
  return PartitionSpec(*(None,) * number, ROWS)


def unsplit_axes() -> dict[str, int]:
  """The ambient mesh's axes that the compiler splits along, and their sizes."""
  mesh = jax.sharding.get_abstract_mesh()
  manual = mesh.manual_axes
  return {axis: n for axis, n in mesh.shape.items() if axis not in manual}


def on_one_device(function: Callable[..., Any]) -> Callable[..., Any]:
  """The same function, for Pallas kernels within `by_rows`.

  The compiler refuses to split them, even along axes of a single device, which
  all `unsplit_axes` have to be.
  """
  axes = unsplit_axes()
  if not axes or not jax.sharding.get_abstract_mesh().manual_axes:
    return function
  return jax.shard_map(
    function,
    in_specs=WHOLE,
    out_specs=WHOLE,
    axis_names=set(axes),
    check_vma=False,
  )


def row_cut(axes: str) -> PartitionSpec:
  """How `ROWS` shard a matrix of one sublayer with these letters."""
  return PartitionSpec(
    *(a if {*ROWS}.issuperset(_named(a)) else None for a in _cuts(axes))
  )


def cut_dim(part: jax.Array, dim: int, size: int) -> int | None:
  """`dim` if `part` is smaller than `size` there; None if it is whole."""
  return None if part.shape[dim] == size else dim


def gather_parts(
  part: jax.Array, dim: int | None, dtype: jax.typing.DTypeLike
) -> jax.Array:
  """Within `by_shards`, gathers a parameter that `fsdp` cuts along `dim`.

  It is sent in the dtype in which it is used: half the bytes of master weights
  for products in bfloat16. No gradient rule, since the gradient has to be
  float32: see `sum_parts`.

  Args:
    part: of this device.
    dim: from `cut_dim`; None if it is whole already.
    dtype: of the result.
  """
  part = part.astype(dtype)
  if dim is None:
    return part
  return jax.lax.all_gather(part, FSDP, axis=dim, tiled=True)


def sum_parts(whole: jax.Array, dim: int | None) -> jax.Array:
  """This device's part of a sum over `fsdp`, as cut for `gather_parts`."""
  if dim is None:
    return whole
  return jax.lax.psum_scatter(whole, FSDP, scatter_dimension=dim, tiled=True)


def _mesh_to_split_over(axes: Sequence[str] = AXES) -> bool:
  mesh = jax.sharding.get_abstract_mesh()
  return not mesh.manual_axes and any(
    mesh.shape.get(axis, 1) > 1 for axis in axes
  )


def shard_batch(
  batch: Mapping[str, np.ndarray], mesh: Mesh
) -> dict[str, jax.Array]:
  """Joins the rows of all processes into global arrays on the mesh."""
  sharding = batch_sharding(mesh)
  return {
    name: jax.make_array_from_process_local_data(sharding, rows)
    for name, rows in batch.items()
  }


def with_sharding(tree: Any, shardings: Any) -> Any:
  """The same tree of `ShapeDtypeStruct`, each with its sharding."""
  return jax.tree.map(
    lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
    tree,
    shardings,
  )


def bytes_per_device(tree: Any) -> int:
  """What each device holds of arrays, or of `ShapeDtypeStruct`s, on a mesh."""

  def one(leaf):
    shape = leaf.sharding.shard_shape(leaf.shape)
    return leaf.dtype.itemsize * math.prod(shape)

  return sum(map(one, jax.tree.leaves(tree)))


def _tensor_divides_tokens(in_specs: Any, args: Sequence[Any]) -> bool:
  """Whether `tensor` divides the tokens of all arguments sharded over it."""
  tensor = jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1)

  def divides(spec: PartitionSpec, arg: Any) -> bool:
    axis = {TOKENS: 1, QUERIED_TOKENS: 2}.get(spec)
    leaves = [] if axis is None else jax.tree.leaves(arg)
    return all(leaf.shape[axis] % tensor == 0 for leaf in leaves)

  return all(jax.tree.leaves(_map_specs(divides, in_specs, tuple(args))))


def _map_specs(function: Callable[..., Any], specs: Any, *trees: Any) -> Any:
  is_spec = lambda node: isinstance(node, PartitionSpec)
  return jax.tree.map(function, specs, *trees, is_leaf=is_spec)


def _axis_sizes(
  config: config_lib.MeshConfig, available: int
) -> dict[str, int]:
  """Sizes in the order of `AXES`, with -1 filled in."""
  given = {a: n for a in AXES if (n := getattr(config, a)) != -1}
  product = math.prod(given.values())
  fills = len(given) < len(AXES)
  fitting = _divisors(available) if fills else range(1, available + 1)
  if product not in fitting:
    # One axis that does not fit by itself, else all that are cut.
    wrong = [axis for axis, size in given.items() if size not in fitting]
    if len(wrong) != 1 or product // given[wrong[0]] not in fitting:
      wrong = [axis for axis, size in given.items() if size > 1]
    size = math.prod(given[axis] for axis in wrong)
    rest = product // size
    near = _nearest(size, [n // rest for n in fitting if n % rest == 0])
    kind = "a divisor of" if fills else "at most"
    times = f" / {rest}, the size of the other axes" if rest > 1 else ""
    config_lib.fail(
      " x ".join(f"mesh.{axis}" for axis in wrong),
      size,
      f"{kind} {available} devices{times}, such as {near}",
    )
  return {axis: given.get(axis, available // product) for axis in AXES}


def _divisors(number: int) -> list[int]:
  return [n for n in range(1, number + 1) if number % n == 0]


def _nearest(size: int, fitting: Sequence[int]) -> str:
  near = sorted(fitting, key=lambda n: abs(n - size))[:2]
  return " or ".join(map(str, sorted(near)))


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
        f" {_nearest(parts, _divisors(size))}",
      )
