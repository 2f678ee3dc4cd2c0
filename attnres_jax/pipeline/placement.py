# SPDX-License-Identifier: Apache-2.0
"""Parameters of a pipeline: how they are stored, and where a step needs them.

Between steps, every matrix is sharded over `stage` as over `fsdp`, along its
width. So each rank has the same share of parameters and optimiser state,
including embedding and head, however uneven the chunks are, and optimiser and
checkpoints are unaware of the pipeline. A step begins with an all-to-all that
brings each rank the sublayers of its chunks, and an all-gather of what all
ranks need; gradients return through the transposes. Per device, this sends the
master weights of its rank once and their gradients once, outside all loops.

Within the step, these weights are still sharded over `fsdp` and `expert`. A
chunk is gathered when it runs, in the dtype of its products, and its gradient
is scattered in that of the master weights. With `pipeline.gather="step"`, all
chunks of a rank are gathered before the first tick, and their gradients
scattered after the last.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec
import numpy as np

from attnres_jax.common import sharding
from attnres_jax.pipeline import layout as layout_lib


class Shared(NamedTuple):
  """The modules of a model other than its sublayers."""

  embedding: Any
  residual: Any
  final_norm: Any

  @classmethod
  def of(cls, model: Any) -> "Shared":
    return cls(model.embedding, model.residual, model.final_norm)


class Parameters(NamedTuple):
  """The parameters of a rank during a step.

  Attributes:
    weights: kind -> module of leaves [V, rows, ...], one index per chunk,
      padded to the rows of the largest chunk.
    shared: the other parameters, whole.
  """

  weights: dict[str, Any]
  shared: Shared


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
  """Brings parameters to their ranks and back, within `shard_map`.

  Specs say how each parameter is sharded between steps, and dtypes in which it
  is sent if it is sharded within the step: that of its products with
  activations. Both are trees like the model. `kinds` has one of each sublayer.
  """

  mesh: Mesh
  layout: layout_lib.Layout
  kinds: tuple[str, ...]
  specs: Any
  dtypes: Any
  gather_when: str

  def collect(self, model: Any) -> Parameters:
    """The parameters of this rank, from the shards stored on all devices.

    Linear. Its transpose also sums gradients over the axes that shard a
    parameter, and `reduce` sums them over the others.
    """
    shared = jax.tree.map(
      functools.partial(self._gather, sharding.AXES, 0),
      Shared.of(model),
      Shared.of(self.specs),
    )
    weights = {
      kind: jax.tree.map(
        functools.partial(self._rows_of_rank, self._rows(kind)),
        stacked,
        self.specs.sublayers[kind],
      )
      for kind, stacked in model.sublayers.items()
    }
    return Parameters(weights, shared)

  def reduce(self, gradient: Any) -> Any:
    """Sums the result of the transpose of `collect` over the remaining axes."""

    def total(g: jax.Array, spec: PartitionSpec) -> jax.Array:
      rest = [a for a in sharding.AXES if a not in _axes(spec)]
      return jax.lax.psum(g, tuple(rest))

    return jax.tree.map(total, gradient, self.specs)

  @property
  def gathers_at_ticks(self) -> bool:
    """Whether a chunk has to be gathered before it can run."""
    return bool(self._cutting_axes) and self.gather_when == "tick"

  def gather(self, weights: dict[str, Any]) -> dict[str, Any]:
    """Gathers weights [chunks, rows, ...].

    Sharded weights are sent and returned in the dtype in which they are used.
    """

    def full(w: jax.Array, spec: PartitionSpec, dtype: jnp.dtype) -> jax.Array:
      if _axes(spec).intersection(self._cutting_axes):
        w = w.astype(dtype)
      return self._gather(self._cutting_axes, 1, w, spec)

    return {
      kind: jax.tree.map(
        full, stacked, self.specs.sublayers[kind], self.dtypes.sublayers[kind]
      )
      for kind, stacked in weights.items()
    }

  def scatter(self, gradient: dict[str, Any]) -> dict[str, Any]:
    """This device's shard of gradients [chunks, rows, ...] summed over all."""

    def shard(g: jax.Array, spec: PartitionSpec) -> jax.Array:
      for dim, axes in enumerate(spec):
        for axis in _names(axes):
          if axis in self._cutting_axes:
            g = jax.lax.psum_scatter(
              g, axis, scatter_dimension=dim + 1, tiled=True
            )
      return g

    return {
      kind: jax.tree.map(shard, stacked, self.specs.sublayers[kind])
      for kind, stacked in gradient.items()
    }

  @property
  def _cutting_axes(self) -> tuple[str, ...]:
    """The axes that shard the weights of a rank within a step."""
    axes = sharding.FSDP, sharding.EXPERT
    return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

  def _rows(self, kind: str) -> np.ndarray:
    """int32 [P, V, rows]: the sublayers of a kind in each chunk.

    Short chunks are padded with the first row, which they never read.
    """
    of_kind = np.asarray([k == kind for k in self.kinds])
    place = np.cumsum(of_kind) - 1
    starts = (0, *self.layout.ends)
    chunks = [
      place[start:stop][of_kind[start:stop]]
      for start, stop in zip(starts, starts[1:])
    ]
    most = max(map(len, chunks))
    filled = [np.pad(rows, (0, most - len(rows))) for rows in chunks]
    shape = self.layout.num_virtual_stages, self.layout.num_ranks, most
    return np.stack(filled).reshape(shape).swapaxes(0, 1).astype(np.int32)

  def _rows_of_rank(
    self, rows_PVR: np.ndarray, w: jax.Array, spec: PartitionSpec
  ) -> jax.Array:
    stage = sharding.STAGE
    if stage in _axes(spec):
      (dim,) = [i for i, axes in enumerate(spec) if stage in _names(axes)]
      w = w[rows_PVR.reshape(-1)]
      w = jax.lax.all_to_all(w, stage, 0, dim, tiled=True)
    else:
      w = w[jnp.asarray(rows_PVR)[jax.lax.axis_index(stage)].reshape(-1)]
    return w.reshape(*rows_PVR.shape[1:], *w.shape[1:])

  def _gather(
    self, over: Sequence[str], skip: int, w: jax.Array, spec: PartitionSpec
  ) -> jax.Array:
    """Gathers over some axes, after `skip` leading dimensions."""
    for dim, axes in enumerate(spec):
      # The last of several axes varies fastest.
      for axis in reversed(_names(axes)):
        if axis in over and self.mesh.shape[axis] > 1:
          w = jax.lax.all_gather(w, axis, axis=dim + skip, tiled=True)
    return w


def _names(axes: Any) -> tuple[str, ...]:
  """The mesh axes of one entry of a PartitionSpec."""
  if axes is None:
    return ()
  return axes if isinstance(axes, tuple) else (axes,)


def _axes(spec: PartitionSpec) -> set[str]:
  return {name for axes in spec for name in _names(axes)}
